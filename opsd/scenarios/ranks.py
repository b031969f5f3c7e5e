"""A simulated rank: a state machine over the phases of its steps, on the clock of its job."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

from opsd.collectors.base import RankFact, StepFact
from opsd.scenarios.signals import Signal

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
