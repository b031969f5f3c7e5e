"""The same faults on a real Slurm cluster and in ``opsd simulate``: how long the run stands still, what it does again.

A sequence is drawn from a seed: a policy, and faults at random times, each of the node that has the ranks of a random
place then. The cluster plays it first; the simulator gets the times at which it really happened, and durations that
other runs have shown (``lifelike_times``). While the job is in the queue no fault comes. Nothing is repaired.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

from opsd.agent.swap import SwapError, planned_swap
from opsd.control import ControlError, ask_launcher
from opsd.settings.policy import PolicySettings
from opsd.simulate.faults import Effect, SimulatedFault
from opsd.simulate.job import Times, policy
from opsd.simulate.play import Play, Played, Setup
from opsd.slurm import ownership
from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm import counting
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until
from tests.integration.slurm.training import Training

ACTIVE, INSIDE = 3, 1
NODES = tuple(f"n{number}" for number in range(1, 7))
POLICIES = ("requeue", "hot", "pool")
STEP_S, EVERY = 0.1, 60
SECONDS = 50.0
"""Of a sequence, from the begin of the first step."""
ATTEMPTS = 3
FOR_EVER_S = 1e6
STANDS_S = 0.5
"""After so long without a step a run stands still; a pause of the machine is shorter."""
FIRST_S, LAST_S, BETWEEN_S = 4.0, 38.0, 12.0
"""When the first fault comes at the earliest and the last at the latest, and the mean time between two."""
WEIGHTS: dict[Effect, int] = {"process": 3, "hardware": 2, "lost": 3, "launcher": 2, "degraded": 2}
RULES = PolicySettings(max_drained_share=0.7, drain_cooldown_s=0.0)
TOLERANCE, SLACK_S = 0.15, 1.0
"""What agreement means: the sums within this share, and three quarters of the sequences within this share or time."""
IDLE = ("detection", "restart", "queue", "waiting", "person", "checkpoint")


@dataclass(frozen=True, slots=True)
class Strike:
    """``effect`` on the node that has the ranks of ``place``, ``at_s`` seconds after the begin of the first step."""

    at_s: float
    effect: Effect
    place: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds without steps in a sequence, and steps that were done again."""

    standstill_s: float
    lost_steps: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A sequence as it went on the cluster, and as the simulator has it."""

    seed: int
    policy: str
    faults: tuple[Strike, ...]
    real: Outcome
    simulated: Outcome

    @property
    def standstill_agrees(self) -> bool:
        """Within ``TOLERANCE``, or ``SLACK_S``."""
        return _agree(self.simulated.standstill_s, self.real.standstill_s, SLACK_S)

    @property
    def lost_steps_agree(self) -> bool:
        """Within ``TOLERANCE``, or the steps of ``SLACK_S``."""
        return _agree(self.simulated.lost_steps, self.real.lost_steps, SLACK_S / STEP_S)

    def __str__(self) -> str:
        struck = ", ".join(f"{one.effect} at {one.place} after {one.at_s:.1f} s" for one in self.faults)
        return (
            f"{self.seed} {self.policy}: {struck or 'nothing'}: stood still {self.real.standstill_s:.2f} s, simulated "
            f"{self.simulated.standstill_s:.2f}; {self.real.lost_steps:.0f} steps lost, simulated "
            f"{self.simulated.lost_steps:.0f}"
        )


def _agree(simulated: float, real: float, slack: float) -> bool:
    return abs(simulated - real) <= max(slack, TOLERANCE * real)


def draw(seed: int) -> tuple[str, tuple[Strike, ...]]:
    """The policy and the faults of ``seed``. Pure."""
    random = Random(seed)
    strikes, at_s = [], FIRST_S + random.expovariate(1 / BETWEEN_S)
    while at_s < LAST_S:
        effect = random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        strikes.append(Strike(at_s, effect, random.randrange(ACTIVE)))
        at_s += random.expovariate(1 / BETWEEN_S)
    return POLICIES[seed % len(POLICIES)], tuple(strikes)


@dataclass
class Counting(Training):
    """A run of the counting program; its job takes as many spares as are free."""

    def submit(self) -> int:
        """See ``Training.submit``."""
        self.folder.mkdir()
        self.folder.chmod(0o777)
        shutil.copy(counting.__file__, self.folder)
        return super().submit()

    @property
    def program(self) -> list[str]:
        """See ``Training.program``."""
        return [str(self.folder / "counting.py"), str(STEP_S), str(EVERY)]

    @property
    def nodes(self) -> str:
        """See ``Training.nodes``."""
        return f"{self.active}-{self.active + self.spares}" if self.spares else str(self.active)


class Struck:
    """A run on the cluster and the faults that it has had."""

    def __init__(self, cluster: Cluster, name: str, kind: str, inside: int = INSIDE) -> None:
        self.cluster = cluster
        self.slurm = CommandSlurm(runner_on(cluster.controller))
        spares, pool = inside if kind == "hot" else 0, "train" if kind == "pool" else ""
        self.training = Counting(cluster, Path(), name, active=ACTIVE, spares=spares, pool=pool)
        self.faults: list[Strike] = []
        self.origin = 0.0
        """Epoch seconds of the begin of the first step."""

    def start(self) -> None:
        """Submit the job and wait for steps, and for the spares."""
        self.training.submit()
        self.training.until(lambda: self.training.step >= 1, "the first step")
        self.origin = self.training.metrics()[0]["t"] - STEP_S

    @property
    def complete(self) -> bool:
        """Whether the job has begun with its spares: a node that has just booted may be idle and not yet be offered."""
        return self.training.standing_by() == self.training.spares

    def strike(self, strike: Strike) -> Strike:
        """Do it, whenever it is due; it is returned, and kept, with the time at which it was done."""
        done = replace(strike, at_s=time.time() - self.origin)
        if places := self._ranked():
            self._do(places[strike.place % len(places)], strike.effect)
        self.faults.append(done)
        return done

    def _ranked(self) -> list[str]:
        """The nodes that have ranks, or will have them again in this start of the job."""
        told = [event for event in self.training.events() if event["event"] in ("generation_started", "finished")]
        return list(told[-1]["nodes"]) if told[-1]["event"] == "generation_started" else []

    def _do(self, node: str, effect: Effect) -> None:
        host = self.cluster.nodes[node]
        if not host.on:
            return
        memory = f"/dev/shm/opsd/{self.training.name}"
        match effect:
            case "lost":
                host.power_off()
            case "process":
                host.run("sh", "-c", f"kill -KILL $(cat {counting.RANK_PID})", check=False)
            case "launcher":
                pid = f"sed -n 's/.*\"launcher_pid\": *\\([0-9]*\\).*/\\1/p' {memory}/run.json"
                host.run("sh", "-c", f"kill -KILL $({pid})", check=False)
            case "hardware":
                host.run("touch", str(counting.DEAD_GPU))
                self._drain(node)
            case "degraded":
                self._drain(node)
                Thread(target=self._swap, args=(node,), daemon=True).start()

    def _swap(self, node: str) -> None:
        """What the agent of a node does that works on and should be replaced."""
        control = self.cluster.nodes[node].root / f"dev/shm/opsd/{self.training.name}/control.sock"
        with suppress(SwapError, ControlError):
            planned_swap(lambda request: ask_launcher(control, request), node, "degraded", patience_s=SECONDS)

    def _drain(self, node: str) -> None:
        """What the agent of the node does."""
        ownership.drain(self.slurm, [node], ownership.reason("gpu_xid"), RULES)

    def outcome(self, seconds: float = SECONDS) -> Outcome:
        """Of so many seconds from the first step on. What is not saved when it stands still at their end is lost."""
        end = self.origin + seconds
        made = [line for line in self.training.metrics() if line["t"] <= end]
        saved = self.training.folder / "run/saved"
        stands = end - made[-1]["t"] > STANDS_S
        kept = (int(saved.read_text()) if saved.exists() else 0) if stands else made[-1]["step"]
        return Outcome(seconds - len(made) * STEP_S, len(made) - kept)

    def gaps(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The last step before and the first one after each standstill."""
        yield from (
            pair for pair in pairwise(self.training.metrics()) if pair[0]["generation"] != pair[1]["generation"]
        )


def play(cluster: Cluster, seed: int, name: str) -> tuple[str, tuple[Strike, ...], Outcome]:
    """The sequence of ``seed`` on the cluster."""
    kind, strikes = draw(seed)
    for attempt in range(ATTEMPTS):
        run = Struck(cluster, f"{name}-{attempt}", kind)
        with restored(cluster):
            run.start()
            if not run.complete:
                continue
            for strike in strikes:
                time.sleep(max(0.0, run.origin + strike.at_s - time.time()))
                run.strike(strike)
            time.sleep(max(0.0, run.origin + SECONDS - time.time()))
            return kind, tuple(run.faults), run.outcome()
    raise RuntimeError(f"the job of sequence {seed} has started without its spares {ATTEMPTS} times")


class PlayByPlace(Play):
    """A simulated run whose faults strike places, not nodes."""

    def begin(self, fault: SimulatedFault) -> None:
        """See ``Play.begin``."""
        if places := self.places:
            super().begin(replace(fault, node=self.node(places[fault.node % len(places)])))


def simulated(kind: str, faults: Iterable[Strike], times: Times, seconds: float = SECONDS) -> Outcome:
    """The same in virtual time."""
    begin_s = times.change_s + times.program_s
    setup = Setup(
        ACTIVE, len(NODES) - ACTIVE, begin_s + seconds, EVERY * STEP_S, 0.0, times=times, rules=RULES, step_s=STEP_S
    )
    chosen = policy(kind, ACTIVE, inside=INSIDE, least=ACTIVE)
    later = [SimulatedFault(one.place, one.at_s + begin_s, FOR_EVER_S, one.effect, one.effect) for one in faults]
    return of_play(PlayByPlace(chosen, setup).run(later), begin_s)


def of_play(played: Played, begin_s: float) -> Outcome:
    """What a simulated run comes to that began to work after ``begin_s``."""
    idle_s = sum(played.buckets[name] for name in IDLE)  # type: ignore[index]
    return Outcome(idle_s - begin_s, played.buckets["lost_work"] / STEP_S)


@contextmanager
def restored(cluster: Cluster) -> Iterator[None]:
    """Whatever was done inside: all nodes are idle and sound after it."""
    try:
        yield
    finally:
        cluster.restore()
        slurm = CommandSlurm(runner_on(cluster.controller))
        for name, host in cluster.nodes.items():
            host.run("rm", "-f", str(counting.DEAD_GPU), str(counting.RANK_PID))
            slurm.set_comment(name, "")
        wait_until(lambda: not slurm.jobs(), "no job is left")


def run(times: Times, seeds: Iterable[int], note: Callable[[str], None], cluster: Cluster) -> list[Comparison]:
    """The sequences of ``seeds``, one after the other."""
    found = []
    for seed in seeds:
        kind, faults, real = play(cluster, seed, f"lifelike-{seed}")
        found.append(Comparison(seed, kind, faults, real, simulated(kind, faults, times)))
        note(str(found[-1]))
    return found
