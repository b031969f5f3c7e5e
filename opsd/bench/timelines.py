"""Random timelines of a node: noise, disturbances that are no fault, and several faults at once.

A quiet timeline has everything but the faults. Temperatures and power wander, collectors fail, hang and come back,
counters begin again at 0, the wall clock steps, the agent is restarted. Everything is drawn from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from opsd.scenarios.model import Scenario

Moment = dict[str, Any]

WARM_UP_S, LAST_S = 60.0, 120.0
"""No fault comes before the first of these seconds, nor in the last of the timeline."""

_WANDER_S = 45.0
_COLLECTORS = ("nvml", "ranks", "host", "kmsg", "infiniband", "storage", "nvme")
_COUNTERS = (
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
    "opsd_gpu_throttle_seconds_total{reason=sw_power_cap}",
    "opsd_gpu_ecc_errors_total{type=corrected,counter=volatile}",
)


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """What happens to a GPU or to the rank on it, the incident that must open, and those that may go with it."""

    kind: str
    begin: Callable[[int], Moment]
    culprit: Callable[[int], dict[str, str | int]] = lambda place: {"gpu": place}
    within: float = 30.0
    allow: tuple[str, ...] = field(default=())


_STOPS = ("rank_crash", "rank_hang", "collective_hang", "throughput_drop", "straggler")
FAULTS = (
    PlantedFault(
        "gpu_ecc", lambda gpu: _set(gpu, "opsd_gpu_ecc_errors_total{type=uncorrected,counter=volatile}", {"add": 1})
    ),
    PlantedFault(
        "gpu_ecc", lambda gpu: _set(gpu, "opsd_gpu_ecc_errors_total{type=corrected,counter=volatile}", {"rate": 6})
    ),
    PlantedFault("gpu_row_remap", lambda gpu: _set(gpu, "DCGM_FI_DEV_ROW_REMAP_FAILURE", 1)),
    PlantedFault("gpu_row_remap", lambda gpu: _set(gpu, "opsd_gpu_row_remap_pending", 1)),
    PlantedFault("pcie_degraded", lambda gpu: _set(gpu, "opsd_gpu_pcie_link_width", 4)),
    PlantedFault("gpu_lost", lambda gpu: {"gpu": gpu, "lost": "GPU is lost"}, allow=_STOPS),
    PlantedFault(
        "gpu_throttle",
        lambda gpu: (
            _set(gpu, "opsd_gpu_throttle_seconds_total{reason=hw_thermal}", {"rate": 1})
            | {"ranks": (gpu,), "slow": {"forward": 1.4, "backward": 1.4}}
        ),
        allow=("straggler", "throughput_drop"),
    ),
    PlantedFault(
        "straggler",
        lambda rank: {"ranks": (rank,), "slow": {"forward": 1.5, "backward": 1.5}},
        lambda rank: {"rank": rank},
        within=90.0,
        allow=("throughput_drop",),
    ),
    PlantedFault(
        "rank_crash",
        lambda rank: {"ranks": (rank,), "crash": {"exit": "signal SIGSEGV"}},
        lambda rank: {"rank": rank},
        allow=("throughput_drop",),
    ),
)


def _set(gpu: int, series: str, value: object) -> Moment:
    return {"gpu": gpu, "set": {series: value}}


def timeline(seed: int, *, faults: int, seconds: float) -> Scenario:
    """A node of 2 to 8 GPUs with ``faults`` faults, each on a GPU of its own, in ``seconds``."""
    rng = random.Random(seed)
    gpus = rng.choice((2, 4, 8))
    moments = [*_wandering(rng, gpus, seconds), *_disturbances(rng, gpus, seconds)]
    expected: list[dict[str, Any]] = []
    allowed: set[str] = set()
    places = rng.sample(range(gpus), min(faults, gpus))
    for fault, place in zip(rng.sample(FAULTS, len(places)), places, strict=True):
        at = rng.uniform(WARM_UP_S, seconds - LAST_S)
        moments.append({"t": at} | fault.begin(place))
        culprit = fault.culprit(place)
        expected.append({"kind": fault.kind, "culprit": culprit, "at": at, "within": fault.within})
        allowed.update(fault.allow)
    job = {
        "ranks": gpus, "world_size": gpus * rng.choice((1, 2, 16)), "step_s": rng.uniform(0.4, 3.0),
        "checkpoint_every": rng.choice((50, 200)),
    }  # fmt: skip
    return Scenario.model_validate({
        "title": f"random timeline {seed}", "duration": seconds, "gpus": gpus, "seed": seed, "job": job,
        "at": moments, "expect": expected, "allow": tuple(allowed),
    })  # fmt: skip


def _wandering(rng: random.Random, gpus: int, seconds: float) -> Iterator[Moment]:
    """Temperature and power of each GPU follow an AR(1) course around their usual values."""
    for gpu in range(gpus):
        kelvin, watts, at = 0.0, 0.0, rng.uniform(0, _WANDER_S)
        while at < seconds:
            kelvin, watts = 0.8 * kelvin + rng.gauss(0, 1.3), 0.8 * watts + rng.gauss(0, 20)
            yield {"t": at, "gpu": gpu, "set": {
                "DCGM_FI_DEV_GPU_TEMP": {"to": 62 + kelvin, "over": _WANDER_S / 2, "noise": 1.0},
                "DCGM_FI_DEV_POWER_USAGE": {"to": 650 + watts, "over": _WANDER_S / 2, "noise": 15.0},
            }}  # fmt: skip
            at += rng.uniform(0.5, 1.5) * _WANDER_S


def _disturbances(rng: random.Random, gpus: int, seconds: float) -> Iterator[Moment]:
    """About one in two minutes."""
    for _ in range(int(seconds / 120)):
        at = rng.uniform(10, seconds - 30)
        match rng.choice(("blind", "hung", "reset", "pause", "restart", "clock")):
            case "blind":
                yield from _without(rng, at, "blind", _COLLECTORS)
            case "hung":
                yield from _without(rng, at, "hung", _COLLECTORS[1:])  # a driver that hangs is a fault
            case "reset":
                yield {"t": at, "gpu": rng.randrange(gpus), "set": {rng.choice(_COUNTERS): 0}}
            case "pause":
                phase, limit = rng.choice((("evaluation", 15.0), ("checkpoint", 5.0), ("data", 1.0)))
                yield {"t": at, "pause": {phase: rng.uniform(0.2, 1) * limit}}
            case "restart":
                yield {"t": at, "agent_restart": True}
            case "clock":
                yield {"t": at, "clock": rng.choice((-0.3, 0.3))}


def _without(rng: random.Random, at: float, how: str, collectors: Sequence[str]) -> Iterator[Moment]:
    collector = rng.choice(collectors)
    yield {"t": at, how: (collector,)}
    yield {"t": at + rng.uniform(1, 25), "sighted": (collector,)}
