"""A simulated job on one node: ranks in lockstep and the launcher that restarts them."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from opsd.collectors.base import Event, Fact, RankFact, RunFact, StepFact
from opsd.scenarios.healthy import Signal
from opsd.scenarios.model import Change, Crash, Hang, ScenarioJob

NOTICED_S = 0.02
LINGER_S = 60.0
"""As long as the collector of ranks reports a run that has ended."""
TOKENS = 16_384


class SimulatedJob:
    """The ranks of a job on one node. ``advance`` moves its time on; facts and events are those of the collector."""

    def __init__(
        self, job: ScenarioJob, node: str, rng: random.Random, began: float, wall: Callable[[float], float]
    ) -> None:
        self.settings, self._node, self._rng, self._wall = job, node, rng, wall
        self.world_size = job.world_size or job.ranks
        self.loss, self.grad_norm = Signal(job.loss, noise=0.01), Signal(0.5, noise=0.02)
        self.remote_stuck = False
        self.commits = True
        self.generation = 0
        self.state, self.alive = "running", True
        self.ranks: list[SimulatedRank] = []
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._late = 0.0
        self._events: list[tuple[float, Event]] = []
        self._written: list[tuple[float, Event]] = []
        self._checkpoint: int | None = None
        self._ended_at = NEVER
        self._awaited: tuple[float, int] | None = None
        self._start(began)

    # -- what the collector sees ---------------------------------------------------------------------------------

    def facts(self) -> Iterator[Fact]:
        """The facts of the ranks and of the run."""
        for rank in self.ranks:
            yield rank.fact(run=self.settings.run, job=self.settings.job, world_size=self.world_size)
        if self.settings.launcher:
            yield RunFact(
                run=self.settings.run,
                job=self.settings.job,
                node=self._node,
                state=self.state,
                generation=self.generation,
                launcher_pid=900,
                alive=self.alive,
                world_size=self.world_size,
                control=f"/dev/shm/opsd/{self.settings.run}/control.sock",  # noqa: S108
                folder=(folder := f"/home/user/.local/state/opsd/runs/{self.settings.run}"),
                logs=f"{folder}/logs",
            )

    def forgotten(self, now: float) -> bool:
        """True once the run has ended so long ago that the node has no pages of it any more."""
        return now - self._ended_at > LINGER_S

    def take_events(self, now: float) -> tuple[Event, ...]:
        """The events that have arrived since the last call."""
        taken = tuple(event for arrives, event in self._events if arrives <= now)
        self._events = [waiting for waiting in self._events if waiting[0] > now]
        return taken

    def read_again(self) -> None:
        """Let the next reading have all events: a collector that starts reads the event files from their beginning."""
        self._events = [*self._written]

    def emit(self, kind: str, at: float, /, **fields: object) -> None:
        """Add an event to the run's events at monotonic second ``at``."""
        data = {"run": self.settings.run, "node": self._node, "generation": self.generation, **fields}
        event = Event(kind, self._wall(at), f"{kind} of {self.settings.run}", data)
        arrives = at + self._late if self._late else -NEVER
        self._written.append((arrives, event))
        self._events.append(self._written[-1])

    # -- time ----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Process everything that is due up to second ``now``."""
        while True:
            rank = min(self.ranks, key=lambda r: r.until, default=None)
            timer = self._timers[0][0] if self._timers else NEVER
            due = min(timer, rank.until if rank else NEVER)
            if due > now:
                return
            if rank is None or timer <= rank.until:
                at, _, callback = heapq.heappop(self._timers)
                callback(at)
            else:
                self._leave(rank, rank.until)

    def _later(self, at: float, callback: Callable[[float], None]) -> None:
        heapq.heappush(self._timers, (at, next(self._order), callback))

    def _leave(self, rank: SimulatedRank, at: float) -> None:
        if rank.phase not in ORDER:
            rank.begin_next(at)
        elif rank.phase == ORDER[-1]:
            self._complete(rank, at)
        else:
            rank.enter(ORDER[ORDER.index(rank.phase) + 1], at)
            self._meet(at)

    def _meet(self, at: float) -> None:
        """Let the ranks continue if all of them have reached the collective."""
        if self.ranks and not self.remote_stuck and all(rank.arrived for rank in self.ranks):
            slowest = max(rank.slow.get("collective", 1.0) for rank in self.ranks)
            for rank in self.ranks:
                rank.until = at + SHARE["collective"] * self.settings.step_s * slowest

    def _complete(self, rank: SimulatedRank, at: float) -> None:
        loss, grad_norm = (rank.loss or self.loss).read(at, self._rng), self.grad_norm.read(at, self._rng)
        assert loss is not None and grad_norm is not None
        rank.complete(at, tokens=TOKENS, loss=loss, grad_norm=grad_norm)
        if self._awaited is not None and rank.generation == self.generation:
            self._resumed(rank, at)
        every = self.settings.checkpoint_every
        if every and rank.next_step % every == 0:
            rank.pauses.append(("checkpoint", self.settings.checkpoint_s))
            if rank is self.ranks[0]:
                step = rank.next_step - 1
                self._later(at + self.settings.checkpoint_s + self.settings.commit_s, lambda t: self._commit(step, t))
        rank.begin_next(at)

    def _commit(self, step: int, at: float) -> None:
        if self.commits and all(rank.process is not None for rank in self.ranks):
            self._checkpoint = self.ranks[0].committed = step
            self.emit("checkpoint_committed", at, step=step)

    # -- the launcher --------------------------------------------------------------------------------------------

    def _start(self, at: float) -> None:
        self.generation += 1
        self.state = "running"
        settings = self.settings
        before = {rank.number: rank for rank in self.ranks}
        self.ranks = [
            SimulatedRank(number, self.generation, 10_000 + 100 * self.generation + number, self._rng, settings.step_s)
            for number in range(settings.ranks)
        ]
        for rank in self.ranks:
            if rank.number in before:  # what makes a rank slow is its GPU or its host
                rank.totals, rank.slow = before[rank.number].totals, before[rank.number].slow
            rank.since = rank.step_began = at
            rank.until = at + settings.setup_s
            rank.first_step_s = settings.first_step_s
            rank.next_step = 0 if self._checkpoint is None else self._checkpoint + 1
        pids = [{"rank": rank.number, "pid": rank.pid} for rank in self.ranks]
        if settings.launcher:
            self.emit("generation_started", at, world_size=self.world_size, standby=0, ranks=pids)

    def _resumed(self, rank: SimulatedRank, at: float) -> None:
        assert self._awaited is not None
        noticed, previous = self._awaited
        self._awaited = None
        step = rank.steps[0].step
        lost = max(0, previous - step + 1)
        self.emit("resumed", at, step=step, previous_step=previous, lost_steps=lost, recovered_s=at - noticed)

    def lose_node(self, at: float) -> None:
        """End all processes of the node at once. No rank page leads to the run's event files any more."""
        self._kill_all(at)
        self._events, self._written = [], []
        self.ranks, self.alive, self._ended_at = [], False, -NEVER
        self.state = "finished"

    def restart(self, at: float) -> None:
        """End the generation and start the next one from the last checkpoint."""
        furthest = max((rank.next_step - 1 for rank in self.ranks), default=-1)
        self._awaited = self._awaited or (at, furthest)
        self._kill_all(at)
        self.state = "restarting"
        self._later(at + self.settings.restart_s, self._start)

    def _give_up(self, at: float, code: int, reason: str) -> None:
        self._kill_all(at)
        self._ended_at, self.alive = at, False
        self.state = "failed"
        self.emit("finished", at, exit_code=code, reason=reason)

    def _kill_all(self, at: float) -> None:
        self._timers.clear()
        for rank in self.ranks:
            rank.set_process(None, at)

    # -- changes by scenarios ------------------------------------------------------------------------------------

    def apply(self, change: Change, at: float) -> None:
        """Apply those parts of ``change`` that concern ranks and launcher."""
        chosen = [rank for rank in self.ranks if change.ranks is None or rank.number in change.ranks]
        for rank in chosen:
            _apply(rank, change, at)
        if change.loss is not None and change.ranks is None:
            self.loss.become(change.loss, at)
        elif change.loss is not None:
            for rank in chosen:
                rank.loss = replace(self.loss)
                rank.loss.become(change.loss, at)
        if change.grad_norm is not None:
            self.grad_norm.become(change.grad_norm, at)
        if change.remote_stuck is not None:
            self.remote_stuck = change.remote_stuck
        if change.commits is not None:
            self.commits = change.commits
        if change.late is not None:
            self._late = change.late
        if change.launcher == "dead":
            self.alive = False
        if change.event is not None:
            fields = dict(change.event)
            self.emit(str(fields.pop("event")), at, **fields)
        if self.state == "finished":
            return
        if change.crash is not None:
            self._crash(chosen[0], change.crash, at)
        if change.hang is not None:
            self._hang(chosen[0], change.hang, at)
        if change.restart is not None:
            self.restart(at)
        if change.finish:
            self._finish(at)
        self._meet(at)

    def _crash(self, rank: SimulatedRank, crash: Crash, at: float) -> None:
        rank.set_process(None, at)
        if not self.settings.launcher:
            return
        last = rank.steps[-1] if rank.steps else None
        self.emit(
            "rank_exited",
            at + NOTICED_S,
            rank=rank.number,
            pid=rank.pid,
            exit=crash.exit,
            step=last.step if last else None,
            phase=rank.phase,
            culprit=True,
            error=crash.error,
            log_tail=crash.log,
            last_step_t=self._wall(last.end) if last else None,
            noticed_s=NOTICED_S,
        )
        self._go_on(crash.restarts, at, crash.exit)

    def _hang(self, rank: SimulatedRank, hang: Hang, at: float) -> None:
        stuck = at - rank.fact(run="", job="", world_size=0).changed
        self.emit(
            "hang_detected",
            at,
            rank=None if hang.nobody else rank.number,
            phase=rank.phase,
            step=rank.next_step - 1,
            stuck_s=stuck,
            limit_s=hang.limit_s,
            reason=hang.reason,
            evidence=[],
            stacks="stacks/gen-0001.txt",
            ranks=[self._seen(other, at) for other in self.ranks],
        )
        self._go_on(hang.restarts, at, "a hang")

    def _seen(self, rank: SimulatedRank, at: float) -> Mapping[str, object]:
        return {
            "rank": rank.number,
            "phase": rank.phase,
            "stuck_s": at - rank.since,
            "process": rank.process,
            "step": rank.next_step - 1,
        }

    def _go_on(self, restarts: bool, at: float, why: str) -> None:
        if restarts and self.alive:
            self.restart(at)
        elif self.alive:
            self._give_up(at, 70, f"the same failure came 3 times: {why}")

    def _finish(self, at: float) -> None:
        self._kill_all(at)
        self._ended_at, self.alive = at, False
        for rank in self.ranks:
            rank.state = "finished"
        self.state = "finished"
        self.emit("finished", at, exit_code=0, reason="all ranks finished")


def _apply(rank: SimulatedRank, change: Change, at: float) -> None:
    if change.slow is not None:
        rank.slow = dict(change.slow)
    if change.creep is not None:
        rank.creep, rank.creep_from = dict(change.creep), rank.next_step
    if change.worker is not None:
        rank.worker = change.worker
    if change.pause is not None:
        rank.pauses.extend(change.pause.items())
    if change.process is not None:
        rank.set_process(change.process, at)
    if change.stall == "":
        rank.release(at)
    elif change.stall is not None:
        rank.stalls.add(change.stall)


ORDER = ("data", "forward", "backward", "collective", "optimizer")
SHARE = {"data": 0.01, "forward": 0.29, "backward": 0.6, "collective": 0.07, "optimizer": 0.03}
"""The phases of a step and the share of its duration that each takes."""

JITTER = 0.005
HALTED = ("T", "t", "Z", "X", "D")
PAGE_STEPS = 64
NEVER = math.inf


@dataclass
class SimulatedRank:
    """One rank. Times are monotonic seconds; ``until`` is when it leaves its phase, ``NEVER`` if it has to wait."""

    number: int
    generation: int
    pid: int
    rng: random.Random
    step_s: float
    phase: str = "setup"
    since: float = 0.0
    until: float = NEVER
    next_step: int = 0
    process: str | None = "S"
    state: str = "running"
    worker: str = "S"
    stalls: set[str] = field(default_factory=set)
    slow: dict[str, float] = field(default_factory=dict)
    creep: dict[str, float] = field(default_factory=dict)
    creep_from: int = 0
    pauses: deque[tuple[str, float]] = field(default_factory=deque)
    first_step_s: float = 0.0
    loss: Signal | None = None
    committed: int | None = None
    steps: deque[StepFact] = field(default_factory=lambda: deque(maxlen=PAGE_STEPS))
    reported: int = 0
    step_began: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    _left: float | None = None

    def enter(self, phase: str, at: float) -> None:
        """Change to ``phase`` at second ``at``."""
        self.spent[self.phase] = self.spent.get(self.phase, 0.0) + at - self.since
        self.phase, self.since = phase, at
        self.until = NEVER if phase == "collective" or phase in self.stalls else at + self.duration(phase)

    def duration(self, phase: str) -> float:
        """How long ``phase`` takes this time."""
        step_s = self.step_s + (self.first_step_s if self.reported == 0 else 0.0)
        noise = max(0.5, self.rng.gauss(1.0, JITTER))
        factor = self.slow.get(phase, 1.0) + self.creep.get(phase, 0.0) * (self.next_step - self.creep_from)
        return SHARE[phase] * step_s * noise * factor

    def complete(self, at: float, *, tokens: int, loss: float, grad_norm: float) -> None:
        """Finish the step at second ``at``; the next one begins."""
        spent = {**self.spent, self.phase: self.spent.get(self.phase, 0.0) + at - self.since}
        self.steps.append(StepFact(self.next_step, at, at - self.step_began, tokens, loss, grad_norm, spent))
        for phase, seconds in spent.items():
            self.totals[phase] = self.totals.get(phase, 0.0) + seconds
        self.next_step += 1
        self.reported += 1
        self.step_began = self.since = at
        self.phase, self.spent = "other", {}

    def begin_next(self, at: float) -> None:
        """Enter a pause that is due, otherwise the first phase of the next step."""
        if self.pauses:
            phase, seconds = self.pauses.popleft()
            self.enter_for(phase, at, seconds)
        else:
            self.enter(ORDER[0], at)

    def enter_for(self, phase: str, at: float, seconds: float) -> None:
        """Go to ``phase`` at second ``at`` and stay there for ``seconds``."""
        self.spent[self.phase] = self.spent.get(self.phase, 0.0) + at - self.since
        self.phase, self.since, self.until = phase, at, at + seconds

    def release(self, at: float) -> None:
        """Leave a stall: the phase takes its usual time again."""
        self.stalls.clear()
        if self.until == NEVER and self.phase in ORDER and self.phase != "collective" and not self.halted:
            self.until = at + self.duration(self.phase)

    @property
    def halted(self) -> bool:
        """True while the process does not run, or is gone."""
        return self.process is None or self.process in HALTED

    @property
    def arrived(self) -> bool:
        """True if the rank waits in the collective and can take part in it."""
        return self.phase == "collective" and self.until == NEVER and not self.halted

    def set_process(self, process: str | None, at: float) -> None:
        """Stop, continue or end (None) the process."""
        before, self.process = self.halted, process
        if self.halted and not before:
            self._left, self.until = self.until - at, NEVER
        elif before and not self.halted and self._left is not None:
            self.until, self._left = at + self._left, None

    def fact(self, *, run: str, job: str, world_size: int) -> RankFact:
        """The rank as the collector reads it from its page."""
        changed = max(self.since, self.steps[-1].end if self.steps else 0.0)
        workers = ((self.pid + 1000, "data"),) if self.worker else ()
        return RankFact(
            run=run,
            job=job,
            rank=self.number,
            local_rank=self.number,
            world_size=world_size,
            generation=self.generation,
            gpu=self.number,
            pid=self.pid,
            state=self.state,
            process=self.process,
            phase=self.phase,
            phase_since=self.since,
            changed=changed,
            steps_reported=self.reported,
            committed_step=self.committed,
            workers=workers,
            steps=tuple(self.steps),
            worker_process=(self.worker,) if workers else (),
        )
