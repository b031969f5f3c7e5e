"""How long a run stands still when a node of it goes: kills, partitions and planned swaps on the test cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.integration.slurm.cluster import Cluster
from tests.integration.slurm.training import Training, make_data

ACTIVE = 3
SERIES = 5
"""So many spares does a job have, one for each trial."""
STEPS = 4000
HEAL_AFTER_S = 15.0


@dataclass(frozen=True, slots=True)
class Trial:
    """``gap_s`` from the last step before to the first new one; ``failed`` says why there is none."""

    gap_s: float
    lost_steps: int
    failed: str = ""


def kill_follower(training: Training) -> None:
    """A node with ranks, but not the head's, loses power."""
    victim = next(name for name in reversed(training.places) if name != training.head)
    training.cluster.nodes[victim].power_off()


def kill_head(training: Training) -> None:
    """The head's node loses power; the first time it is the batch host too."""
    training.cluster.nodes[training.head].power_off()


def swap(training: Training) -> None:
    """Somebody asks for a node to be replaced."""
    answer = training.ask(training.places[0], cmd="swap", node=training.places[-1], reason="bench")
    if not answer["ok"]:
        raise RuntimeError(str(answer["error"]))


def cut_off(training: Training) -> None:
    """A node with ranks is cut off from the rest for a while, and all that time believes itself healthy."""
    training.cluster.partition([training.places[-1]])


SCENARIOS: dict[str, Callable[[Training], None]] = {
    "node_killed": kill_follower,
    "head_killed": kill_head,
    "partition": cut_off,
    "planned_swap": swap,
}


def series(
    cluster: Cluster, training: Training, cause: Callable[[Training], None], trials: int, again: str = "resumed"
) -> list[Trial]:
    """``trials`` of one kind in one job, each with the run steady again before it.

    ``again`` is the event after which the run goes on.
    """
    job = training.submit()
    found: list[Trial] = []
    try:
        training.until_steady()
        for _ in range(trials):
            found.append(_trial(training, cause, again))
            if found[-1].failed:
                break
    finally:
        cluster.heal()
        cluster.controller.run("scancel", str(job), check=False)
        for name, host in cluster.nodes.items():
            if not host.on:
                host.power_on()
                cluster.start_node(host)
                cluster.controller.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
    with suppress(TimeoutError):
        cluster.wait_idle(60)
    return found


def cold(cluster: Cluster, data: Path, trials: int) -> list[Trial]:
    """A node of a run without spares loses power: the job is requeued, and goes on on other nodes."""
    found = []
    for number in range(trials):
        training = Training(cluster, data, f"cold-{number}", active=ACTIVE, spares=0, steps=STEPS)
        found += series(cluster, training, kill_follower, 1, again="generation_started")
    return found


def _trial(training: Training, cause: Callable[[Training], None], again: str) -> Trial:
    before, step = len(training.events(again)), training.step
    training.until(lambda: training.step >= step + 25, "twenty-five steps", 120)
    cause(training)
    healed = cause is not cut_off
    began = time.monotonic()
    try:
        training.until(lambda: len(training.events(again)) > before, "the run to go on", 90)
        if not healed:
            time.sleep(max(0.0, HEAL_AFTER_S - (time.monotonic() - began)))
            training.cluster.heal()
        generation = training.events(again)[-1]["generation"]
        training.until(lambda: training.metrics()[-1]["generation"] == generation, "steps", 60)
        gap, lost = training.gap_s(generation), training.lost_steps(generation)
    except (TimeoutError, ValueError) as error:
        return Trial(0.0, 0, str(error)[:4000])
    return Trial(gap, lost, _two_sides(training))


def _two_sides(training: Training) -> str:
    """A sentence if a generation has made steps after a later one had begun to."""
    newest = 0
    for line in training.metrics():
        if line["generation"] < newest:
            return f"generation {line['generation']} made step {line['step']} after generation {newest} had begun"
        newest = line["generation"]
    return ""


def summary(trials: list[Trial]) -> dict[str, Any]:
    """The numbers of one scenario; the 99th percentile of so few is the largest."""
    gaps = sorted(trial.gap_s for trial in trials if not trial.failed)
    return {
        "p50_s": round(median(gaps), 2) if gaps else None,
        "p99_s": round(gaps[-1], 2) if gaps else None,
        "lost_steps_max": max((trial.lost_steps for trial in trials if not trial.failed), default=None),
        "trials": len(trials),
        "failed": sum(bool(trial.failed) for trial in trials),
    }


def run(trials: int, note: Callable[[str], None], names: tuple[str, ...] = tuple(SCENARIOS)) -> dict[str, Any]:
    """All scenarios; raises RuntimeError if there can be no cluster here."""
    hosts = [f"n{number}" for number in range(1, ACTIVE + SERIES + 1)]
    results: dict[str, Any] = {}
    with Cluster(hosts) as cluster:
        data = make_data(cluster.shared)
        for name in names:
            found: list[Trial] = []
            while len(found) < trials:
                number = len(found)
                training = Training(
                    cluster, data, f"{name}-{number}", active=ACTIVE, spares=SERIES, steps=STEPS,
                )  # fmt: skip
                found += series(cluster, training, SCENARIOS[name], min(SERIES, trials - number))
                for trial in found[number:]:
                    note(f"{name}: {trial.failed or f'{trial.gap_s:.2f} s, {trial.lost_steps} steps lost'}")
                if found[-1].failed:
                    break
            results[name] = summary(found)
        found = cold(cluster, data, trials)
        for trial in found:
            note(f"cold: {trial.failed or f'{trial.gap_s:.2f} s, {trial.lost_steps} steps lost'}")
        results["cold"] = summary(found)
    return results
