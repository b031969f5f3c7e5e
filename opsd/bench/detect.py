"""Precision, recall and latency of detection: on timelines at random, scenarios and material of others.

Random timelines of a node: noise, disturbances that are no fault, and several faults at once.

A quiet timeline has everything but the faults. Temperatures and power wander, collectors fail, hang and come back,
counters begin again at 0, the wall clock steps, the agent is restarted. Everything is drawn from the seed.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from opsd.bench.outside import FOLDER, SETS, judged
from opsd.runbooks import RUNBOOKS
from opsd.scenarios.model import Scenario, ScenarioError, files, load
from opsd.scenarios.player import ScenarioResult, judge, play
from opsd.stragglers.table import TableError

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


# Quality of detection: material from outside, random timelines, every scenario of the tests, three healthy days.
#
# The outside sets (``outside``) come first, because the scenarios were written together with what they test. The
# random timelines (``random``) have seeds of their own; every fault, disturbance and noise in them is drawn. Shares
# of both have 95 % intervals. A rate of false alarms is per hour of a node, in quiet timelines, with the upper end
# of its interval.
#
# Each scenario is played once through the agent's own window, runbooks and policy under a virtual clock, in mode act
# where it is written for that mode. The healthy time is ``NODES`` simulated nodes with ``HOURS`` each, with
# different noise, evaluation pauses, checkpoints, occasional data loader delays and a planned restart. There the
# agent ticks every ``LOOK_S`` seconds instead of every second, the longest interval at which runbooks can still
# compare with the last ten minutes. Changes between two ticks are therefore not covered.


SCENARIOS = Path(__file__).parents[2] / "tests" / "scenarios"
NODES, HOURS = 12, 6.0
LOOK_S = 5.0
HOUR_S = 3600.0
SEED = 1_000_000
"""The first seed of the random timelines; no test uses one that is so high."""
TIMELINES, TIMELINE_S = 100, 400.0
QUIET, QUIET_S = 36, 1200.0
"""Without a fault: 12 hours of a node."""
Z = 1.959964
"""Standard deviations on either side of 95 % of a normal distribution."""
PREDICTIONS = frozenset(book.kind for book in RUNBOOKS if book.prediction)
"""Kinds that predict a failure; the guide of each states how far ahead."""


def run(seed: int = SEED, outside: Path | None = None) -> dict[str, Any]:
    """``outside`` by set, ``random`` with the timelines from ``seed`` on, and the own scenarios.

    With ``outside`` only the sets that were fetched into that folder.
    Of the scenarios ``precision, recall, culprit_accuracy, scenarios, latency_s`` (kind -> median), and false alarms in
    72 hours. ``prediction_precision`` and ``prediction_recall`` are those of ``PREDICTIONS`` alone.

    Raises ScenarioError where opsd was installed without its tests, or ``outside`` has nothing that is known.
    """
    if outside is not None:
        return fetched_sets(outside)
    found = list(files(SCENARIOS))
    if not found:
        raise ScenarioError(f"{SCENARIOS}: no scenarios; run `opsd bench detect` in a clone of opsd")
    return {
        "outside": {name: shares(list(results(FOLDER))) for name, results in SETS.items()},
        "random": random_timelines(seed),
        **score(_result(load(path)) for path in found),
        "healthy_hours": NODES * HOURS,
        "healthy_look_s": LOOK_S,
        "healthy_false_alarms": sum(len(false_alarms(seed, HOURS)) for seed in range(NODES)),
    }


def fetched_sets(folder: Path) -> dict[str, Any]:
    """The sets that were fetched into ``folder``. Raises ScenarioError."""
    try:
        found = judged(folder)
    except (TableError, OSError) as error:
        raise ScenarioError(f"{folder}: {error}") from error
    if not found:
        raise ScenarioError(f"{folder} has no clone that is known; docs/research/detection.md says which")
    return {name: shares(result) if isinstance(result, list) else result for name, result in found.items()}


def random_timelines(seed: int, count: int = TIMELINES, quiet: int = QUIET) -> dict[str, Any]:
    """``count`` timelines with one to three faults at once, and ``quiet`` without any; seeds from ``seed`` on."""
    faulty = [_random(at, 1 + at % 3, TIMELINE_S) for at in range(seed, seed + count)]
    calm = [_random(at, 0, QUIET_S) for at in range(seed + count, seed + count + quiet)]
    alarms = Counter(kind for result in calm for kind in result.false_alarms)
    hours = quiet * QUIET_S / HOUR_S
    return {
        "seed": seed,
        **shares(faulty),
        "missed": dict(Counter(kind for result in faulty for kind in result.missed)),
        "false_alarms": dict(Counter(kind for result in faulty for kind in result.false_alarms)),
        "quiet_node_hours": hours,
        "quiet_false_alarms": dict(alarms),
        "quiet_false_alarms_per_node_hour": alarms.total() / hours,
        "quiet_false_alarms_per_node_hour_at_most": highest_rate(alarms.total(), hours),
    }


def _random(seed: int, faults: int, seconds: float) -> ScenarioResult:
    scenario = timeline(seed, faults=faults, seconds=seconds)
    return judge(scenario, play(scenario, "observe"))


def shares(results: Sequence[ScenarioResult]) -> dict[str, Any]:
    """Counts, and shares with their 95 % intervals, of results from outside or at random."""
    hits = [hit for result in results for hit in result.hits]
    missed = sum(len(result.missed) for result in results)
    alarms = sum(len(result.false_alarms) for result in results)
    right = sum(hit.culprit_right for hit in hits)
    latencies = [hit.latency_s for hit in hits if hit.latency_s is not None]
    return {
        "cases": len(results),
        "expected": len(hits) + missed,
        "found": len(hits),
        "unexpected": alarms,
        "precision": _share(len(hits), len(hits) + alarms),
        "precision_interval": interval(len(hits), len(hits) + alarms),
        "recall": _share(len(hits), len(hits) + missed),
        "recall_interval": interval(len(hits), len(hits) + missed),
        "culprit_accuracy": _share(right, len(hits)),
        "culprit_accuracy_interval": interval(right, len(hits)),
        "latency_s": median(latencies) if latencies else None,
        "worst_latency_s": max(latencies, default=None),
    }


def interval(part: int, whole: int) -> tuple[float, float]:
    """The 95 % interval of a share of which ``part`` of ``whole`` were seen (Wilson 1927)."""
    if not whole:
        return 0.0, 1.0
    share, spread = part / whole, Z * Z / whole
    middle, half = share + spread / 2, Z * math.sqrt(share * (1 - share) / whole + spread / (4 * whole))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return (low if part else 0.0), (high if part < whole else 1.0)


def highest_rate(count: int, hours: float) -> float:
    """The upper end of the 95 % interval of a rate per hour of which ``count`` were seen (Byar's approximation)."""
    n = count + 1
    return float(n * (1 - 1 / (9 * n) + Z / (3 * math.sqrt(n))) ** 3 / hours)


def score(results: Iterable[ScenarioResult]) -> dict[str, Any]:
    """The statistics of results. Without any incident expected or found, precision, recall and accuracy are 1.

    ``flawed`` are scenarios with any difference from what was expected: too late, a wrong action or severity.
    """
    known = list(results)
    hits = [hit for verdict in known for hit in verdict.hits]
    missed = [kind for verdict in known for kind in verdict.missed]
    alarms = [kind for verdict in known for kind in verdict.false_alarms]
    foreseen, unforeseen, wrongly = (
        sum(kind in PREDICTIONS for kind in kinds) for kinds in ([hit.kind for hit in hits], missed, alarms)
    )
    latencies: defaultdict[str, list[float]] = defaultdict(list)
    for hit in hits:
        if hit.latency_s is not None:
            latencies[hit.kind].append(hit.latency_s)
    return {
        "scenarios": len(known),
        "precision": _share(len(hits), len(hits) + len(alarms)),
        "recall": _share(len(hits), len(hits) + len(missed)),
        "prediction_precision": _share(foreseen, foreseen + wrongly),
        "prediction_recall": _share(foreseen, foreseen + unforeseen),
        "culprit_accuracy": _share(sum(hit.culprit_right for hit in hits), len(hits)),
        "flawed": sum(bool(verdict.problems) for verdict in known),
        "latency_s": {kind: median(seconds) for kind, seconds in sorted(latencies.items())},
        "worst_latency_s": {kind: max(seconds) for kind, seconds in sorted(latencies.items())},
    }


def false_alarms(seed: int, hours: float, look_s: float = LOOK_S) -> list[str]:
    """The kinds of incident that open on a healthy node in ``hours``; ``seed`` is that of its noise."""
    return sorted(
        incident.kind for incident in play(healthy_node(seed, hours), "act", look_s=look_s).incidents.values()
    )


def healthy_node(seed: int, hours: float) -> Scenario:
    """A node with two GPUs and a job of two ranks that trains for ``hours`` without a fault."""
    seconds = hours * HOUR_S
    changes = [
        {"t": 600, "every": 1800, "times": max(1, int(seconds / 1800)), "pause": {"evaluation": 20.0}},
        {
            "t": 1000 + 100 * seed,
            "every": 2000,
            "times": max(1, int(seconds / 2000)),
            "ranks": (1,),
            "pause": {"data": 1.5},
        },
        {"t": seconds / 2, "restart": "a new release of the training code"},
    ]
    node = {"title": "nothing is wrong", "duration": seconds, "gpus": 2, "seed": seed, "job": {"ranks": 2}}
    return Scenario.model_validate({**node, "at": changes})


def _result(scenario: Scenario) -> ScenarioResult:
    mode = "act" if "act" in scenario.played_in else scenario.played_in[0]
    return judge(scenario, play(scenario, mode))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
