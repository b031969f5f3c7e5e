"""Throttling, and the power limit that cures it, as the simulated driver counts and sets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opsd.collectors.nvml import NvmlError
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.clock import eventually
from tests.fakes.nvml import DriverProcess, driver_process, samples

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
