"""How long a run without spares stands still: it goes back into the queue and starts again on other nodes.

Or it has a spare fetched from the partition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.integration.slurm.cluster import FAST, Cluster, wait_until
from tests.integration.slurm.training import Training, make_data
from tests.integration.slurm.trials import Scenario, Trial, failure, since

ACTIVE = 3
STEPS = 4000
SETTLED_STEP = 45
AGAIN_S = 240.0
DEFAULTS: Mapping[str, str] = {}
"""Slurm's own timeouts, periods and delays."""
DOWN_S = 120.0
LIMIT = ("--time=3", "--signal=USR1@75")
SAVED_S = 10.0
"""Within 5 s of a change slurmctld has saved its state."""
OUTAGE_TRIALS = 2
"""An outage takes minutes: it is tried this often at most."""


def kill_follower(training: Training) -> None:
    """A node with ranks, but not the leader's, loses power."""
    victim = next(name for name in reversed(training.places) if name != training.leader)
    training.cluster.nodes[victim].power_off()


def kill_batch_host(training: Training) -> None:
    """The node with the batch script loses power; it is the first of the job, and the leader's."""
    training.cluster.nodes[sorted(training.places)[0]].power_off()


@contextmanager
def _cluster(settings: Mapping[str, str], nodes: int = 5) -> Iterator[tuple[Cluster, Path]]:
    with Cluster([f"n{number}" for number in range(1, nodes + 1)], settings) as cluster:
        yield cluster, make_data(cluster.shared)


def killed(cause: Callable[[Training], None], trials: int, note: Callable[[Trial], None]) -> None:
    """A node loses power where the job has no spare, on Slurm's default settings."""
    with _cluster(DEFAULTS) as (cluster, data):
        for number in range(trials):
            training = Training(cluster, data, f"cold-{number}", active=ACTIVE, spares=0, steps=STEPS)
            training.submit()
            note(_again(training, cause))
            cluster.restore()


def fetched(cause: Callable[[Training], None], trials: int, note: Callable[[Trial], None]) -> None:
    """The same by the template with a pool: a job of one node in the same partition brings the run a spare."""
    with _cluster(DEFAULTS) as (cluster, data):
        for number in range(trials):
            training = Training(cluster, data, f"fetched-{number}", ACTIVE, 0, STEPS, pool="train")
            training.submit()
            note(_again(training, cause))
            cluster.restore()


def _again(training: Training, cause: Callable[[Training], object]) -> Trial:
    """Let ``cause`` end a run that has come to its pace, and wait for the first steps of the next start."""
    try:
        training.until(lambda: training.step >= SETTLED_STEP, "the first steps")
        before = training.events("generation_started")[-1]["generation"]
        cause(training)
        training.until(lambda: training.metrics()[-1]["generation"] > before, "steps after the requeue", AGAIN_S)
        return since(training, training.metrics()[-1]["generation"])
    except (TimeoutError, ValueError, RuntimeError) as error:
        return failure(error)


def preempted(trials: int, note: Callable[[Trial], None]) -> None:
    """A job of higher priority takes all nodes for a moment."""
    with _cluster(FAST, nodes=ACTIVE) as (cluster, data):
        for number in range(trials):
            training = Training(cluster, data, f"preempted-{number}", ACTIVE, 0, STEPS, options=["--partition=dev"])
            training.submit()
            note(_again(training, _preempt))
            cluster.restore()


def _preempt(training: Training) -> None:
    intruder = ("sbatch", f"--nodes={ACTIVE}", "--exclusive", "--partition=train", "--wrap", "sleep 1")
    training.cluster.controller.run(*intruder)


def time_limit(trials: int, note: Callable[[Trial], None]) -> None:
    """The job comes to its time limit, of which Slurm tells the launchers 75 seconds before."""
    with _cluster(FAST, nodes=ACTIVE) as (cluster, data):
        for number in range(trials):
            training = Training(cluster, data, f"limited-{number}", ACTIVE, 0, STEPS, options=LIMIT)
            training.submit()
            note(_again(training, lambda _: None))
            cluster.restore()


def controller_down(trials: int, note: Callable[[Trial], None]) -> None:
    """The controller is away for two minutes: the gap is the longest between two steps in that time."""
    with _cluster(DEFAULTS) as (cluster, data):
        for number in range(min(trials, OUTAGE_TRIALS)):
            training = Training(cluster, data, f"unnoticed-{number}", active=ACTIVE, spares=1, steps=STEPS)
            training.submit()
            training.until_steady()
            with _without_controller(training):
                began = time.time()
                time.sleep(DOWN_S)
                ended = time.time()
            times = [line["t"] for line in training.metrics() if began <= line["t"] <= ended]
            pauses = [later - earlier for earlier, later in zip([began, *times], [*times, ended], strict=True)]
            again = "" if len(training.events("generation_started")) == 1 else "the run has started again"
            note(Trial(max(pauses), 0, again))
            cluster.restore()


def requeue_without_controller(trials: int, note: Callable[[Trial], None]) -> None:
    """A node dies while the controller is away: the requeue is done once it is back, and once.

    The gap begins with its return.
    """
    with _cluster(DEFAULTS) as (cluster, data):
        for number in range(min(trials, OUTAGE_TRIALS)):
            note(_outage(Training(cluster, data, f"retried-{number}", active=ACTIVE, spares=0, steps=STEPS)))
            cluster.restore()


def _outage(training: Training) -> Trial:
    cluster, job, back = training.cluster, training.submit(), 0.0

    def cause(training: Training) -> None:
        nonlocal back
        with _without_controller(training):
            kill_follower(training)
            time.sleep(DOWN_S)
        back = time.time()

    trial = _again(training, cause)
    if trial.failed:
        return trial
    shown = cluster.controller.run("squeue", "-h", f"--jobs={job}", "-O", "RestartCnt").stdout.strip()
    first = next(line["t"] for line in training.metrics() if line["t"] > back)
    return Trial(first - back, trial.lost_steps, "" if shown == "1" else f"restarted {shown} times")


@contextmanager
def _without_controller(training: Training) -> Iterator[None]:
    """Kill slurmctld once it has written down that the job runs, and start it again at the end."""
    saved = training.events("generation_started")[0]["t"] + SAVED_S
    wait_until(lambda: time.time() > saved, "the state is saved")
    training.cluster.stop_controller()
    try:
        yield
    finally:
        training.cluster.start_controller()


SCENARIOS: dict[str, Scenario] = {
    "fetched_node_killed": partial(fetched, kill_follower),
    "fetched_batch_host_killed": partial(fetched, kill_batch_host),
    "cold_node_killed": partial(killed, kill_follower),
    "cold_batch_host_killed": partial(killed, kill_batch_host),
    "preempted": preempted,
    "time_limit": time_limit,
    "controller_down": controller_down,
    "requeue_without_controller": requeue_without_controller,
}
