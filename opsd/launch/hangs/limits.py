"""How long a rank may stay unchanged: configured limits, and what the run has taught about its phases."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from opsd.rank_page import RankPage, StepRecord

WARM_STEPS = 3
FACTOR, LONG_FACTOR = 3.0, 5.0
STARTUP_MIN_S, CHECKPOINT_MIN_S, EVALUATION_MIN_S, FINISH_S = 60.0, 60.0, 120.0, 600.0
UNKNOWN = "unknown"
"""The phase of a rank without a page."""
INPUT = "input"
"""The phase of a rank that waits for a person or for requests."""


@dataclass(frozen=True, slots=True)
class HangLimits:
    """The configurable limits, in seconds.

    ``unannounced_s`` replaces ``steady_s`` if a page says nothing of evaluation and saving. ``idle_s`` is for
    processes that do nothing at all, in every phase. ``recognised_s`` is granted for what stacks or file writes show.
    """

    steady_s: float = 5.0
    data_s: float = 20.0
    startup_s: float = 1800.0
    long_s: float = 3600.0
    unannounced_s: float = 60.0
    idle_s: float = 600.0
    recognised_s: float = 900.0


@dataclass(slots=True)
class _Learnt:
    compute: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    data: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    checkpoint: float = 0.0
    evaluation: float = 0.0
    startup: float = 0.0


class LearntLimits:
    """The limit of each phase, learnt from the pages given to ``learn``."""

    def __init__(self, limits: HangLimits) -> None:
        self.configured = limits
        self._learnt = _Learnt()
        self._seen: dict[int, int] = {}
        self._announcing: set[int] = set()
        self._patience: dict[str, float] = {}
        self._tolerated: dict[str, float] = {}

    def new_generation(self) -> None:
        """Forget the ranks, keep what the run has taught."""
        self._seen.clear()

    def limit(self, phase: str) -> float:
        """Seconds that a rank may stay unchanged in ``phase`` after its first steps."""
        limit = self.usual(phase) * self._patience.get(phase, 1.0)
        return max(limit, self._tolerated.get(phase, 0.0))

    def usual(self, phase: str) -> float:
        """The limit of ``phase`` without what earlier hangs and near hangs have added."""
        learnt, limits = self._learnt, self.configured
        if phase == UNKNOWN:
            return limits.idle_s
        if phase == "setup":
            return max(STARTUP_MIN_S, LONG_FACTOR * learnt.startup) if learnt.startup else limits.startup_s
        if phase == "checkpoint":
            return max(CHECKPOINT_MIN_S, LONG_FACTOR * learnt.checkpoint) if learnt.checkpoint else limits.long_s
        if phase == "evaluation":
            return max(EVALUATION_MIN_S, LONG_FACTOR * learnt.evaluation) if learnt.evaluation else limits.long_s
        if phase == "data":
            return max(limits.data_s, FACTOR * percentile_99(learnt.data))
        return max(limits.steady_s, FACTOR * percentile_99(learnt.compute))

    def page_limit(self, page: RankPage) -> float:
        """The limit of a rank by its page."""
        if page.state == "finished":
            return FINISH_S
        if page.steps_reported < WARM_STEPS and page.phase not in ("checkpoint", "evaluation"):
            return self.limit("setup")
        limit = self.limit(page.phase)
        if page.rank in self._announcing:
            return limit
        return max(limit, self.configured.unannounced_s * self._patience.get(page.phase, 1.0))

    def recognised(self, phase: str) -> float:
        """The limit of work that was not announced as ``phase`` but is recognised as such."""
        if phase == INPUT:
            return self.configured.long_s
        return max(self.limit(phase), self.configured.recognised_s)

    def more_patience(self, phase: str) -> None:
        """Allow more in ``phase`` from now on."""
        self._patience[phase] = self._patience.get(phase, 1.0) * FACTOR

    def tolerate(self, phase: str, seconds: float) -> None:
        """A rank went on after ``seconds`` without a change in ``phase``."""
        self._tolerated[phase] = max(self._tolerated.get(phase, 0.0), seconds)

    def learn(self, page: RankPage) -> None:
        """Take in the steps of ``page`` that are new."""
        seen = self._seen.get(page.rank, 0)
        fresh = page.steps[-(page.steps_reported - seen) :] if page.steps_reported > seen else ()
        self._seen[page.rank] = page.steps_reported
        if not page.observed and page.phase not in ("other", "setup"):
            self._announcing.add(page.rank)
        first_fresh = page.steps_reported - len(fresh)
        for number, record in enumerate(fresh, start=first_fresh + 1):
            if number == WARM_STEPS:
                self._learnt.startup = max(self._learnt.startup, record.end - page.created)
            if number >= WARM_STEPS:
                self._learn_step(page, record)

    def _learn_step(self, page: RankPage, record: StepRecord) -> None:
        data, checkpoint, evaluation = (record.phase(name) for name in ("data", "checkpoint", "evaluation"))
        self._learnt.compute.append(max(0.0, record.duration_s - data - checkpoint - evaluation))
        self._learnt.data.append(data)
        self._learnt.checkpoint = max(self._learnt.checkpoint, checkpoint)
        self._learnt.evaluation = max(self._learnt.evaluation, evaluation)
        if not page.observed and record.phase("other") + record.phase("setup") < record.duration_s / 2:
            self._announcing.add(page.rank)


def percentile_99(values: deque[float]) -> float:
    """The 99th percentile by nearest rank, 0 without values."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else 0.0
