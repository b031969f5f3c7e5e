"""How long a run stands still when a node of it goes: kills, partitions and planned swaps with spares standing by."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.integration.slurm import cold, peers
from tests.integration.slurm.cluster import Cluster
from tests.integration.slurm.training import Training, make_data
from tests.integration.slurm.trials import Scenario, Trial, failure, since, summary

ACTIVE = 3
SERIES = 5
"""So many spares does a job have, one for each trial."""
STEPS = 4000
BETWEEN = 25
"""Steps before the next trial."""
HEAL_AFTER_S = 15.0

Cause = Callable[[Training], None]


def kill_head(training: Training) -> None:
    """The leader's node loses power; the first time it is the batch host too."""
    training.cluster.nodes[training.leader].power_off()


def swap(training: Training) -> None:
    """Somebody asks for a node to be replaced."""
    answer = training.ask(training.places[0], cmd="swap", node=training.places[-1], reason="bench")
    if not answer["ok"]:
        raise RuntimeError(str(answer["error"]))


def cut_off(training: Training) -> None:
    """A node with ranks is cut off from the rest for a while, and all that time believes itself healthy."""
    training.cluster.partition([training.places[-1]])


def with_spares(cause: Cause, trials: int, note: Callable[[Trial], None]) -> None:
    """``trials`` of one kind, several in one job, each with the run steady again before it."""
    with Cluster([f"n{number}" for number in range(1, ACTIVE + SERIES + 1)]) as cluster:
        data = make_data(cluster.shared)
        for number in range(0, trials, SERIES):
            training = Training(cluster, data, f"run-{number}", active=ACTIVE, spares=SERIES, steps=STEPS)
            training.submit()
            training.until_steady()
            for _ in range(min(SERIES, trials - number)):
                trial = _trial(training, cause)
                note(trial)
                if trial.failed:
                    break
            cluster.restore()


def _trial(training: Training, cause: Cause) -> Trial:
    before, step = len(training.events("resumed")), training.step
    try:
        training.until(lambda: training.step >= step + BETWEEN, "steps before the next trial")
        began = time.monotonic()
        cause(training)
        training.until(lambda: len(training.events("resumed")) > before, "the run to go on")
        if cause is cut_off:
            time.sleep(max(0.0, HEAL_AFTER_S - (time.monotonic() - began)))
            training.cluster.heal()
        generation = training.events("resumed")[-1]["generation"]
        training.until(lambda: training.metrics()[-1]["generation"] == generation, "steps")
        return since(training, generation)
    except (TimeoutError, ValueError, RuntimeError) as error:
        return failure(error)


SCENARIOS: dict[str, Scenario] = {
    "node_killed": partial(with_spares, cold.kill_follower),
    "head_killed": partial(with_spares, kill_head),
    "partition": partial(with_spares, cut_off),
    "planned_swap": partial(with_spares, swap),
    **cold.SCENARIOS,
}
NAMES = (*SCENARIOS, *peers.SCENARIOS)


def run(trials: int, note: Callable[[str], None], names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """The scenarios and peers of these ``names``; raises RuntimeError if there can be no cluster here.

    Peers that are not installed are left out.
    """
    results: dict[str, dict[str, Any]] = {"scenarios": {}, "peers": {}}
    for name in names:
        if not peers.installed(name):
            note(f"{name}: the peer is not installed")
            continue
        found: list[Trial] = []

        def noted(trial: Trial, name: str = name, found: list[Trial] = found) -> None:
            found.append(trial)
            note(f"{name}: {trial}")

        kind, scenario = ("scenarios", SCENARIOS[name]) if name in SCENARIOS else ("peers", peers.SCENARIOS[name])
        scenario(trials, noted)
        results[kind][name] = summary(found)
    return results
