"""What the GPUs' units do, read through the driver, and not where that is not possible or not wanted."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from opsd.collectors.lib.nvml import gpm
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.clock import eventually
from tests.fakes.nvml import DriverProcess, of_gpu, samples


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
