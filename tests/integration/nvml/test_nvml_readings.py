"""What the NVML collector reads, with the real pynvml over the simulated driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from opsd.collectors.lib.nvml import series as nvml_series
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.clock import eventually
from tests.fakes.nvml import DriverProcess, facts, of_gpu, process_letter, samples


def test_every_gpu_has_the_same_series_under_dcgm_exporters_labels(gpus: SimulatedGpus, collector: Any) -> None:
    """All metrics but those of other hardware and of processes appear in the first reading already."""
    gpus[3].load(utilization=97, power_watts=650, memory_ratio=0.5)
    got = samples(collector.collect())
    uuid, model = gpus[3].uuid, "NVIDIA H100 80GB HBM3 (simulated)"
    dcgm = ("3", uuid, "00000000:4A:00.0", "nvidia3", model, "node", "node")
    assert got["DCGM_FI_DEV_GPU_UTIL", *dcgm] == 97
    assert got["DCGM_FI_DEV_FB_USED", *dcgm] == pytest.approx(got["DCGM_FI_DEV_FB_FREE", *dcgm], abs=1)
    assert got["opsd_gpu_power_limit_watts", "3", uuid] == 700
    assert got["opsd_gpu_temperature_threshold_celsius", "3", uuid, "slowdown"] == 90
    assert got["opsd_gpu_clock_max_hertz", "3", uuid, "sm"] == 1.98e9
    per_gpu = [of_gpu(got, index).keys() for index in range(8)]
    assert all(names == per_gpu[0] for names in per_gpu)
    absent = {metric.name for metric in nvml_series.METRICS} - {name for name, *_ in got}
    older = {"opsd_gpu_retired_pages", "opsd_gpu_retired_pages_pending"}
    newer = {"opsd_gpu_fabric_info", "opsd_gpu_fabric_problem"}
    assert absent == older | newer | {"opsd_gpu_orphan_processes", "opsd_gpu_orphan_memory_bytes"}
    assert len(got) >= 646


def test_simulated_gpus_are_labelled_as_such(collector: Any) -> None:
    """In the facts, the info series and the model's name."""
    reading = collector.collect()
    assert all(fact.simulated and "simulated" in fact.model for fact in facts(reading))
    infos = [labels for name, *labels in samples(reading) if name == "opsd_gpu_info"]
    assert {labels[-1] for labels in infos} == {"yes"}
    assert {labels[4] for labels in infos} == {"580.95.05"}


def test_errors_and_links_are_read(gpus: SimulatedGpus, collector: Any) -> None:
    """Each counter in its own series, none mixed up with another."""
    gpus[1].set_ecc(corrected=11, uncorrected=1)
    gpus[1].set_ecc(corrected=22, uncorrected=2, aggregate=True)
    gpus[1].set_remapped_rows(correctable=3, uncorrectable=4, pending=True)
    gpus[1].set_pcie(generation=3, width=8, replays=77)
    gpus[1].set_nvlink(17, active=False, replay=5, recovery=6, crc=7)
    gpus[1].set_recovery_action(4)
    gpus[1].set_pcie_errors(non_fatal=8, fatal=9)
    gpus[1].set_sram_exceeded(True)
    gpus[1].set_processes([(123, 1 << 30), (456, 1 << 31)])
    mine = of_gpu(samples(collector.collect()), 1)
    dcgm = {name.removeprefix("DCGM_FI_DEV_"): value for name, *_ in mine for value in [mine.get((name,))]}
    assert [mine["opsd_gpu_ecc_errors_total", kind, "volatile"] for kind in ("corrected", "uncorrected")] == [11, 1]
    assert [mine["opsd_gpu_ecc_errors_total", kind, "aggregate"] for kind in ("corrected", "uncorrected")] == [22, 2]
    assert (dcgm["CORRECTABLE_REMAPPED_ROWS"], dcgm["UNCORRECTABLE_REMAPPED_ROWS"]) == (3, 4)
    assert (mine["opsd_gpu_row_remap_pending",], dcgm["ROW_REMAP_FAILURE"]) == (1, 0)
    assert (mine["opsd_gpu_pcie_link_generation",], mine["opsd_gpu_pcie_link_generation_max",]) == (3, 5)
    assert (mine["opsd_gpu_pcie_link_width",], dcgm["PCIE_REPLAY_COUNTER"]) == (8, 77)
    assert (mine["opsd_gpu_nvlink_up", "17"], mine["opsd_gpu_nvlink_up", "16"]) == (0, 1)
    assert mine["opsd_gpu_nvlink_link_errors_total", "17"] == 18
    assert mine["opsd_gpu_nvlink_errors_total", "replay"] == 5
    assert mine["opsd_gpu_recovery_action",] == 4
    assert [mine["opsd_gpu_pcie_errors_total", severity] for severity in ("non_fatal", "fatal")] == [8, 9]
    assert mine["opsd_gpu_sram_threshold_exceeded",] == 1
    assert (mine["opsd_gpu_processes",], mine["opsd_gpu_process_memory_bytes",]) == (2, 3 << 30)


def test_energy_and_traffic_advance_with_time(gpus: SimulatedGpus, collector: Any) -> None:
    """Counters, so that rates can be taken of them."""
    gpus[0].nvlink_bytes_per_second = 100e9
    gpus[0].load(utilization=100, power_watts=600)

    def counters() -> list[float]:
        got = of_gpu(samples(collector.collect()), 0)
        return [v for k, v in got.items() if "ENERGY" in k[0] or "NVLINK_BANDWIDTH" in k[0]]

    first = counters()
    assert len(first) == 2
    assert eventually(lambda: all(new > old for new, old in zip(counters(), first, strict=True)))


def test_what_is_not_supported_has_no_series_and_is_not_asked_again(gpus: SimulatedGpus, collector: Any) -> None:
    """A missing call costs one attempt per session, a missing field none of the others."""
    gpus[0].set_unsupported(["nvmlDeviceGetEncoderUtilization", "nvmlDeviceGetMarginTemperature", 82, 230, 165])
    first = samples(collector.collect())
    before = gpus[0].calls, gpus[1].calls
    second = samples(collector.collect())
    assert gpus[1].calls - before[1] == gpus[0].calls - before[0] + 2
    missing = of_gpu(second, 1).keys() - of_gpu(second, 0).keys()
    assert {name for name, *_ in missing} == {
        "DCGM_FI_DEV_ENC_UTIL",
        "opsd_gpu_temperature_margin_celsius",
        "DCGM_FI_DEV_MEMORY_TEMP",
        "opsd_gpu_recovery_action",
        "opsd_gpu_nvlink_up",
    }
    assert first.keys() == second.keys()


def test_a_driver_without_field_values_still_shows_its_gpus(gpus: SimulatedGpus, collector: Any) -> None:
    """Neither they nor the firmware's version nor events are there on every platform."""
    gpus[0].set_unsupported(["nvmlDeviceGetFieldValues", "nvmlDeviceGetVbiosVersion", "nvmlDeviceRegisterEvents"])
    got = samples(collector.collect())
    assert got["opsd_gpu_up", "0", gpus[0].uuid] == 1
    assert ("opsd_gpu_row_remap_pending", "0", gpus[0].uuid) not in got
    assert [labels[5] for name, *labels in got if name == "opsd_gpu_info" and labels[0] == "0"] == [""]


def test_the_place_in_the_fabric_is_told(gpus: SimulatedGpus, collector: Any) -> None:
    """State, the status of a finished registration, and only those problems that the hardware can tell of."""
    gpus[1].set_fabric(state=2, status=999)
    gpus[2].set_fabric(state=3, status=9, health=0x1 | 0x2 << 4)
    gpus[2].set_domain(UUID("5e797fc6-0f46-421a-8724-0e102c0f723c"), 1234)
    gpus[3].set_fabric(state=0)
    got = samples(collector.collect())
    told = [{k: v for k, v in of_gpu(got, gpu).items() if k[0].startswith("opsd_gpu_fabric")} for gpu in range(4)]
    assert told == [
        {("opsd_gpu_fabric_state",): 3, ("opsd_gpu_fabric_status",): 0},
        {("opsd_gpu_fabric_state",): 2},
        {
            ("opsd_gpu_fabric_info", "5e797fc6-0f46-421a-8724-0e102c0f723c", "1234"): 1,
            ("opsd_gpu_fabric_state",): 3,
            ("opsd_gpu_fabric_status",): 9,
            ("opsd_gpu_fabric_problem", "degraded_bandwidth"): 1,
            ("opsd_gpu_fabric_problem", "route_unhealthy"): 0,
        },
        {},
    ]


def test_dead_processes_that_hold_a_gpu_are_told(gpus: SimulatedGpus, process: DriverProcess, library: str) -> None:
    """Zombies and processes that are gone, with the memory they keep; the fact has their numbers."""
    gpus[0].set_processes([(50, 1 << 30), (150, 2 << 30), (250, 4 << 30)])
    gpus[1].set_processes([(51, 1 << 30)])
    collector = process.NvmlCollector(library, process_letter=process_letter)
    reading = collector.collect()
    first, second = (of_gpu(samples(reading), gpu) for gpu in (0, 1))
    assert (first["opsd_gpu_orphan_processes",], first["opsd_gpu_orphan_memory_bytes",]) == (2, 6 << 30)
    assert (second["opsd_gpu_orphan_processes",], second["opsd_gpu_orphan_memory_bytes",]) == (0, 0)
    assert [fact.orphans for fact in facts(reading)[:2]] == [(150, 250), ()]
    gpus[0].lost = True
    assert facts(collector.collect())[0].orphans == ()


def test_who_holds_a_gpu_is_known_only_from_a_complete_list(
    gpus: SimulatedGpus, process: DriverProcess, library: str
) -> None:
    """An idle GPU is nobody's. One whose memory is used by no process of the list is left out: it may be anybody's."""
    gpus[1].load(utilization=90, power_watts=500, memory_ratio=0.5)
    gpus[2].set_processes([(50, 1 << 30)])
    gpus[3].set_unsupported(["nvmlDeviceGetComputeRunningProcesses_v3"])
    holders = process.Holders(library).read()
    assert [holders.get(gpu, "unknown") for gpu in range(4)] == [(), "unknown", (50,), "unknown"]


def test_a_call_that_blocks_is_never_made(gpus: SimulatedGpus, collector: Any) -> None:
    """The call for PCIe throughput samples for 20 ms."""
    for _ in range(3):
        collector.collect()
    assert [gpu.blocking_calls for gpu in gpus] == [0] * 8


NVITOP = """
from nvitop import Device
from nvitop_exporter.exporter import PrometheusExporter
from prometheus_client import CollectorRegistry

registry = CollectorRegistry()
exporter = PrometheusExporter(Device.all(), hostname="node", registry=registry)
for device in exporter.devices:
    exporter.update_device(device)
for family in registry.collect():
    for sample in family.samples:
        print(sample.name, sample.labels.get("index"), sample.value)
"""


def test_the_peer_of_the_benchmark_runs_on_the_same_gpus(gpus: SimulatedGpus, library: str) -> None:
    """nvitop-exporter finds every GPU and link and shows what was set."""
    pytest.importorskip("nvitop_exporter")
    gpus[5].load(utilization=93, power_watts=600)
    environment = {**os.environ, **gpus.environment(Path(library))}
    command = [sys.executable, "-c", NVITOP]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    shown = [line.split() for line in result.stdout.splitlines()]
    assert ["gpu_utilization_Percentage", "5", "93.0"] in shown
    assert len([name for name, *_ in shown if name == "gpu_nvlink_tx_throughput_MiBps"]) == 8 * 18
