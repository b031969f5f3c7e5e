"""Quality of detection: every scenario of the tests, and three days of healthy nodes.

Each scenario is played once through the agent's own window, runbooks and policy under a virtual clock, in mode act
where it is written for that mode. The healthy time is ``NODES`` simulated nodes with ``HOURS`` each, with different
noise, evaluation pauses, checkpoints, occasional data loader delays and a planned restart. There the agent ticks every
``LOOK_S`` seconds instead of every second, the longest interval at which runbooks can still compare with the last ten
minutes. What happens between two ticks is therefore not covered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from opsd.runbooks import RUNBOOKS
from opsd.scenarios.model import Scenario, ScenarioError, files, load
from opsd.scenarios.player import play
from opsd.scenarios.verdict import ScenarioResult, judge

SCENARIOS = Path(__file__).parents[2] / "tests" / "scenarios"
NODES, HOURS = 12, 6.0
LOOK_S = 5.0
HOUR_S = 3600.0
PREDICTIONS = frozenset(book.kind for book in RUNBOOKS if book.prediction)
"""Kinds that predict a failure; the guide of each states how far ahead."""


def run() -> dict[str, Any]:
    """``precision, recall, culprit_accuracy, scenarios, latency_s`` (kind -> median), and false alarms in 72 hours.

    ``prediction_precision`` and ``prediction_recall`` are those of ``PREDICTIONS`` alone.

    Raises ScenarioError where opsd was installed without its tests.
    """
    found = list(files(SCENARIOS))
    if not found:
        raise ScenarioError(f"{SCENARIOS}: no scenarios; run `opsd bench detect` in a clone of opsd")
    return {
        **score(_result(load(path)) for path in found),
        "healthy_hours": NODES * HOURS,
        "healthy_look_s": LOOK_S,
        "healthy_false_alarms": sum(len(false_alarms(seed, HOURS)) for seed in range(NODES)),
    }


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
