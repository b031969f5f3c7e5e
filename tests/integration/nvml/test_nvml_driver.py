"""The NVML collector while GPUs are lost or replaced, and while the driver is away, reloaded or hangs."""

from __future__ import annotations

import ctypes.util
import threading
from pathlib import Path
from typing import Any

import pytest

from opsd.collectors.base import NoData
from opsd.collectors.nvml import NvmlError
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.clock import eventually
from tests.fakes.nvml import DriverProcess, driver_process, facts, of_gpu, samples


def test_a_lost_gpu_is_told_and_the_others_go_on(gpus: SimulatedGpus, collector: Any) -> None:
    """It has no values but the zero that says so, and is back when it answers again."""
    collector.collect()
    gpus[2].lost = True
    reading = collector.collect()
    got = samples(reading)
    assert got["opsd_gpu_up", "2", gpus[2].uuid] == 0
    assert got["opsd_gpu_up", "3", gpus[3].uuid] == 1
    assert [fact.lost for fact in facts(reading)] == [None, None, "GPU is lost", None, None, None, None, None]
    left = {name for name, *_ in of_gpu(got, 2)}
    assert left == {"opsd_gpu_up", "DCGM_FI_DEV_XID_ERRORS", "opsd_gpu_info"}
    gpus[2].lost = False
    reading = collector.collect()
    assert samples(reading)["opsd_gpu_up", "2", gpus[2].uuid] == 1
    assert facts(reading)[2].lost is None


def test_a_gpu_lost_before_the_start_is_found_after_its_reset(
    gpus: SimulatedGpus, process: DriverProcess, library: str
) -> None:
    """Only a new session of the driver shows it; one is opened from time to time while a GPU is lost."""
    gpus[5].lost = True
    collector = process.NvmlCollector(library, reopen_s=0.0)
    reading = collector.collect()
    assert samples(reading)["opsd_gpu_up", "5", ""] == 0
    assert facts(reading)[5].lost == "GPU is lost"
    gpus[5].lost = False
    assert samples(collector.collect())["opsd_gpu_up", "5", gpus[5].uuid] == 1


def test_a_gpu_that_is_replaced_while_running_is_another_one(
    gpus: SimulatedGpus, process: DriverProcess, library: str
) -> None:
    """Its slot has the new board's series, and none of the old one's stay behind."""
    collector = process.NvmlCollector(library, reopen_s=0.0)
    collector.collect()
    old, gpus[4].lost = gpus[4].uuid, True
    collector.collect()
    gpus[4].replace(board=12)
    reading = collector.collect()
    assert facts(reading)[4].uuid == gpus[4].uuid != old
    assert facts(reading)[4].lost is None
    assert not [key for key in samples(reading) if old in key]


def test_a_call_that_hangs_holds_up_its_collector_only_as_long_as_it_hangs(gpus: SimulatedGpus, collector: Any) -> None:
    """The agent runs collectors in threads of their own; afterwards everything is there again."""
    collector.collect()
    calls, readings = gpus[6].calls, []
    gpus[6].hang_s = 60.0
    thread = threading.Thread(target=lambda: readings.append(collector.collect()))
    thread.start()
    assert eventually(lambda: gpus[6].calls > calls)
    assert thread.is_alive()
    gpus[6].hang_s = 0.0
    thread.join(20.0)
    assert samples(readings[0])["opsd_gpu_up", "6", gpus[6].uuid] == 1


def test_a_driver_that_fails_to_initialise_is_an_error_until_it_works(gpus: SimulatedGpus, collector: Any) -> None:
    """Not an absence: somebody has to look at the node."""
    gpus.fail_init(18)
    with pytest.raises(NvmlError, match="version mismatch"):
        collector.collect()
    gpus.fail_init(0)
    assert len(facts(collector.collect())) == 8


def test_a_reload_of_the_driver_costs_one_collection(gpus: SimulatedGpus, collector: Any) -> None:
    """The session that ended is an error once, then there is a new one; how often is counted."""
    assert samples(collector.collect())["opsd_gpu_driver_reloads_total",] == 0
    gpus.reload_driver()
    with pytest.raises(NvmlError, match="opened again"):
        collector.collect()
    reading = collector.collect()
    assert len(facts(reading)) == 8
    assert samples(reading)["opsd_gpu_driver_reloads_total",] == 1


def test_a_driver_that_is_not_loaded_is_no_data(tmp_path: Path, library: str) -> None:
    """The library is there, the kernel module is not."""
    with driver_process({"OPSD_SIMULATED_NVML": str(tmp_path / "none")}) as process:
        assert process.NvmlCollector(library).collect() == NoData("no NVIDIA driver on this node: Driver Not Loaded")


def test_a_node_without_the_library_is_no_data() -> None:
    """Most nodes where opsd is tried first."""
    if ctypes.util.find_library("nvidia-ml"):
        pytest.skip("this machine has an NVIDIA driver")
    with driver_process({}) as process:
        assert isinstance(process.NvmlCollector().collect(), NoData)


def test_a_driver_without_gpus_is_no_data(tmp_path: Path, library: str) -> None:
    """Nothing to watch is not healthy."""
    gpus = SimulatedGpus.create(tmp_path / "gpus", count=0)
    with driver_process({"OPSD_SIMULATED_NVML": str(gpus.path)}) as process:
        assert isinstance(process.NvmlCollector(library).collect(), NoData)


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """A wrong path in the configuration is an error, not a node without GPUs."""
    with driver_process({}) as process, pytest.raises(NvmlError, match=r"libnvidia-ml\.so\.1 cannot be loaded"):
        process.NvmlCollector(str(tmp_path / "libnvidia-ml.so.1")).collect()


def test_a_state_file_of_another_layout_is_refused(tmp_path: Path, library: str) -> None:
    """Reading it would show nonsense as measurements."""
    (tmp_path / "gpus").write_bytes(b"OPSD" * 10_000)
    with driver_process({"OPSD_SIMULATED_NVML": str(tmp_path / "gpus")}) as process, pytest.raises(NvmlError):
        process.NvmlCollector(library).collect()


def test_a_gpu_that_answers_nothing_is_not_up(gpus: SimulatedGpus, collector: Any) -> None:
    """Stale handles are refused call by call after a reset; that must not pass for a GPU that supports nothing."""
    collector.collect()
    tick_calls = (
        "UtilizationRates MemoryInfo_v2 ComputeRunningProcesses_v3 Temperature MarginTemperature PowerUsage ClockInfo "
        "PowerManagementLimit EncoderUtilization DecoderUtilization PerformanceState PersistenceMode "
        "CurrPcieLinkGeneration CurrPcieLinkWidth CurrentClocksEventReasons GpuFabricInfoV"
    )
    gpus[0].set_unsupported([f"nvmlDeviceGet{name}" for name in tick_calls.split()])
    reading = collector.collect()
    assert samples(reading)["opsd_gpu_up", "0", gpus[0].uuid] == 0
    assert facts(reading)[0].lost == "the driver knows the GPU but answers no call about it"
