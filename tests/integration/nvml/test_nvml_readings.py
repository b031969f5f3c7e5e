"""What the NVML collector reads over the simulated driver: power, profiling, Xids."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from opsd.collectors.lib.nvml import gpm
from opsd.collectors.lib.nvml import series as nvml_series
from opsd.collectors.nvml import NvmlError
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.clock import eventually
from tests.fakes.nvml import DriverProcess, driver_process, facts, of_gpu, process_letter, samples

# What the NVML collector reads, with the real pynvml over the simulated driver.


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


# Throttling, and the power limit that cures it, as the simulated driver counts and sets them.


SW_THERMAL, POWER_BRAKE = 0x20, 0x80


@pytest.mark.parametrize("driver", [570, 575, 580])
@pytest.mark.parametrize("counters_work", [True, False])
def test_throttle_seconds_under_every_driver(tmp_path: Path, library: str, driver: int, counters_work: bool) -> None:
    """Time adds up whether the driver counts it, under whatever number, or the mask has to do."""
    gpus = SimulatedGpus.create(tmp_path / "gpus", driver=driver)
    gpus[4].throttle_counters_work = counters_work
    with driver_process({"OPSD_SIMULATED_NVML": str(gpus.path)}) as process:
        collector = process.NvmlCollector(library)

        def seconds(reason: str) -> float:
            return samples(collector.collect())["opsd_gpu_throttle_seconds_total", "4", gpus[4].uuid, reason]

        assert seconds("hw_thermal") == 0
        gpus[4].throttle_reasons = SW_THERMAL | POWER_BRAKE
        for reason in ("sw_thermal", "hw_power_brake", "hw_slowdown"):
            assert eventually(lambda reason=reason: seconds(reason) > 0.2), reason
        gpus[4].throttle_reasons = 0
        assert eventually(lambda: seconds("sw_thermal") >= 0 and not gpus[4].throttle_reasons & SW_THERMAL)
        after = seconds("sw_thermal")
        assert seconds("sw_thermal") == after
        if counters_work and driver >= 575:
            assert after == gpus[4].throttle_counters_s["sw_thermal"]
        assert (seconds("hw_thermal"), seconds("sync_boost")) == (0, 0)


def test_degraded_cooling_throttles_and_a_lower_power_limit_cures_it(
    gpus: SimulatedGpus, process: DriverProcess, collector: Any, library: str
) -> None:
    """What the gpu_throttle runbook does has the effect it has on real hardware."""
    gpu = gpus[3]
    gpu.thermal_tau_s = 0.2
    gpu.load(utilization=98, power_watts=680)
    gpu.cooling = 0.6
    key = ("opsd_gpu_throttle_seconds_total", "3", gpu.uuid, "sw_thermal")

    def throttled() -> bool:
        reading = collector.collect()
        assert key in samples(reading)
        return bool(gpu.throttle_reasons & SW_THERMAL)

    assert eventually(throttled)
    assert gpu.sm_clock_mhz < 1980
    process.PowerControl(library).set_power_limit(3, 500)
    assert eventually(lambda: not throttled())
    before = samples(collector.collect())[key]
    assert gpu.temperature < 87
    assert samples(collector.collect())[key] == before


def test_the_power_limit_is_set_and_stays(
    gpus: SimulatedGpus, process: DriverProcess, collector: Any, library: str
) -> None:
    """By index or UUID; every other process sees it."""
    control = process.PowerControl(library)
    control.set_power_limit(2, 550.5)
    control.set_power_limit(gpus[4].uuid, 400)
    assert [gpu.power_limit_watts for gpu in gpus] == [700, 700, 550.5, 700, 400, 700, 700, 700]
    assert samples(collector.collect())["opsd_gpu_power_limit_watts", "2", gpus[2].uuid] == 550.5


@pytest.mark.parametrize(
    ("gpu", "watts", "why"),
    [
        (2, 100, "must be between 200 and 700 W"),
        (2, 900, "must be between 200 and 700 W"),
        (3, 500, "run the agent as root"),
        (5, 500, "GPU is lost"),
        (12, 500, "GPU 12 was not set to 500 W: Invalid Argument"),
        ("GPU-unknown", 500, "Not Found"),
    ],
)
def test_a_power_limit_that_cannot_be_set_says_why(
    gpus: SimulatedGpus, process: DriverProcess, library: str, gpu: int | str, watts: float, why: str
) -> None:
    """Out of range, not permitted, lost or unknown; nothing is changed."""
    gpus[3].set_denied(["nvmlDeviceSetPowerManagementLimit"])
    gpus[5].lost = True
    with pytest.raises(NvmlError, match=why):
        process.PowerControl(library).set_power_limit(gpu, watts)
    assert {gpu.power_limit_watts for gpu in gpus} == {700}


# What the GPUs' units do, read through the driver, and not where that is not possible or not wanted.


def test_what_the_units_do_is_read_without_dcgm(gpus: SimulatedGpus, collector: Any) -> None:
    """Shares of time and bytes per second between two looks, under the names of DCGM's profiling metrics."""
    gpus[3].load(utilization=80, power_watts=600)
    gpus[3].tensor_share = 0.5
    gpus[3].nvlink_bytes_per_second = 200e9
    gpus[3].pcie_bytes_per_second = 30e9
    collector.collect()
    wanted = {
        "GR_ENGINE_ACTIVE": 0.8,
        "SM_ACTIVE": 0.72,
        "SM_OCCUPANCY": 0.2,
        "PIPE_TENSOR_ACTIVE": 0.4,
        "DRAM_ACTIVE": 0.48,
        "PCIE_TX_BYTES": 30e9,
        "PCIE_RX_BYTES": 30e9,
        "NVLINK_TX_BYTES": 200e9,
        "NVLINK_RX_BYTES": 200e9,
    }

    def shown() -> dict[str, float]:
        got = of_gpu(samples(collector.collect()), 3)
        return {name.removeprefix("DCGM_FI_PROF_"): v for (name, *_), v in got.items() if "_PROF_" in name}

    assert eventually(lambda: shown() == pytest.approx(wanted, rel=0.01))
    assert shown().keys() == shown().keys() == wanted.keys()


@pytest.mark.parametrize("how", ["no hardware", "old driver", "refused", "switched off"])
def test_a_gpu_that_cannot_tell_what_its_units_do(
    gpus: SimulatedGpus, process: DriverProcess, library: str, how: str
) -> None:
    """It has no such series and one that says so; everything else is there."""
    gpus[0].profiling = how != "no hardware"
    gpus[0].set_unsupported({"old driver": ["nvmlGpmQueryDeviceSupport"], "refused": ["nvmlGpmSampleGet"]}.get(how, []))
    collector = process.NvmlCollector(library, profiling=how != "switched off")
    got = samples(collector.collect())
    assert of_gpu(got, 0)["opsd_gpu_profiling",] == 0
    assert of_gpu(got, 1)["opsd_gpu_profiling",] == (how != "switched off")
    missing = {name for name, *_ in of_gpu(got, 1)} - {name for name, *_ in of_gpu(got, 0)}
    assert missing <= {metric.name for metric in gpm.METRICS}
    assert bool(missing) == (how != "switched off")


def test_gpm_taken_away_while_running_costs_nothing_else(gpus: SimulatedGpus, collector: Any) -> None:
    """Its series end, and it is not asked for again."""
    collector.collect()
    gpus[0].set_unsupported(["nvmlGpmSampleGet"])
    assert eventually(lambda: of_gpu(samples(collector.collect()), 0)["opsd_gpu_profiling",] == 0)
    got = samples(collector.collect())
    assert of_gpu(got, 0)["opsd_gpu_up",] == 1
    assert ("DCGM_FI_PROF_DRAM_ACTIVE",) not in of_gpu(got, 0)


def test_what_the_units_do_is_not_read_while_something_else_reads_it(gpus: SimulatedGpus, library: str) -> None:
    """DCGM's profiling comes first; once it is gone the driver is asked again."""
    assert gpus[0].profiling
    script = f"""
        from opsd.collectors.nvml import NvmlCollector
        elsewhere = [False, True, False]
        collector = NvmlCollector({library!r}, profiled_elsewhere=lambda: elsewhere[0])
        shown = []
        while elsewhere:
            reading = collector.collect()
            shown.append(any(sample.metric.name.startswith("DCGM_FI_PROF") for sample in reading.samples))
            elsewhere.pop(0)
        print(shown)
    """
    environment = {**os.environ, "OPSD_SIMULATED_NVML": str(gpus.path)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[True, False, True]\n", done.stderr


# Xids from the driver, and who is first to tell of them.


def test_an_xid_is_an_event_once(gpus: SimulatedGpus, collector: Any) -> None:
    """Also that of a GPU which has fallen off the bus; dcgm-exporter's gauge shows the last one."""
    gpus[7].raise_xid(13)  # before anybody listened
    assert collector.collect().events == ()
    gpus[7].raise_xid(94)
    gpus[7].raise_xid(79)
    gpus[7].lost = True
    reading = collector.collect()
    assert [event.data["code"] for event in reading.events] == [94, 79]
    where = {"pci_bus_id": facts(reading)[7].pci_bus_id, "gpu": 7, "uuid": gpus[7].uuid}
    assert where.items() <= reading.events[0].data.items()
    assert samples(reading)["opsd_xid_total", where["pci_bus_id"], "94"] == 1
    reading = collector.collect()
    assert reading.events == ()
    assert [v for k, v in samples(reading).items() if k[:2] == ("DCGM_FI_DEV_XID_ERRORS", "7")] == [79]


def test_the_kernel_log_is_given_time_to_tell_of_an_xid_first(
    gpus: SimulatedGpus, process: DriverProcess, library: str
) -> None:
    """It knows more; what it does not tell of within a collection comes from the driver, with the time it was seen."""
    collector = process.BesideKernelLog(library)
    first = collector.collect()
    assert not [name for name, *_ in samples(first) if name == "opsd_xid_total"]
    gpus[2].raise_xid(31)
    gpus[2].raise_xid(94)
    assert collector.collect().events == ()
    assert collector.kernel_tells(31, facts(first)[2].pci_bus_id)
    (event,) = collector.collect().events
    assert (event.data["code"], event.data["source"]) == (94, "nvml")
    assert not collector.kernel_tells(94, facts(first)[2].pci_bus_id)
    reading = collector.collect()
    assert reading.events == ()
    assert [v for k, v in samples(reading).items() if k[:2] == ("DCGM_FI_DEV_XID_ERRORS", "2")] == [94]
