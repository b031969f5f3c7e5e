"""Tells a hang from slow progress, and names the rank it comes from. Pure: pages and the time come as arguments.

How long a rank may stay unchanged depends on what it is doing, and is learnt from the run itself:

=====================================  ==========================================================================
phase                                  limit
=====================================  ==========================================================================
until ``WARM_STEPS`` steps are done    ``startup_s`` (loading, compiling), later 5 x the longest start seen, >= 60 s
data                                   3 x p99 of the waits seen, >= ``data_s``: the agent repairs a stalled loader
checkpoint, evaluation                 5 x the longest seen, >= 60 s and 120 s; before the first ``long_s``
all others                             3 x p99 of the step time without the phases above, >= ``steady_s``
=====================================  ==========================================================================

A process stopped by a signal has ``steady_s`` in every phase. A rank that waits for another is not judged as long as
that other one is within its own limit. Stacks can excuse a rank: one that compiles or saves gets the limit of that
phase whatever it reported. After a hang for which nothing but the time spoke, the limit of its phase is tripled, so
that something slow but finite gets through at a later attempt; how long it took is then remembered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from opsd.client import RankPage, StepRecord
from opsd.launch.hangs.stacks import Stack

WARM_STEPS = 3
FACTOR, LONG_FACTOR = 3.0, 5.0
STARTUP_MIN_S, CHECKPOINT_MIN_S, EVALUATION_MIN_S, FINISH_S = 60.0, 60.0, 120.0, 600.0
SUSPECT_BEFORE_S = 2.5
"""A stall is looked into this long before its limit, so that the stacks are there when it is reached."""
EARLY_S = 0.3
"""A hang is named this long before the limit, so that the event is out by then."""
_STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "dead", "X": "dead"}
_APART_S = 0.1
_PAUSE_S = 3.0
"""Not asked for this long, the launcher itself was stopped (a suspended job), and time starts from zero again."""


@dataclass(frozen=True, slots=True)
class HangLimits:
    """The configurable part of the limits, in seconds."""

    steady_s: float = 5.0
    data_s: float = 20.0
    startup_s: float = 1800.0
    long_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where one rank stands. ``process`` is the kernel's state letter, None if the process is gone.

    ``judged_as`` is the phase whose limit applies: not that reported for a rank that starts, or that a stack excused.
    ``waits``: by its phase or its stack it is in a collective; ``where`` is the innermost frame of its main thread.
    """

    rank: int
    phase: str
    judged_as: str
    step: int | None
    changed: float
    stuck_s: float
    limit_s: float
    process: str | None
    waits: bool = False
    where: str = ""

    @property
    def progress(self) -> int:
        """The last completed step, -1 before the first."""
        return -1 if self.step is None else self.step


@dataclass(frozen=True, slots=True)
class Stall:
    """Ranks that have not changed for suspiciously long; ``due`` once one of them has reached its limit."""

    ranks: tuple[RankStatus, ...]
    longest: RankStatus
    due: bool


@dataclass(frozen=True, slots=True)
class Hang:
    """A verdict. ``rank`` is None when no rank stands out; ``evidence`` are sentences, which weigh ``score``.

    ``stacks`` is the file with the stacks of the ranks, None if it could not be written.
    """

    rank: int | None
    phase: str
    step: int | None
    stuck_s: float
    limit_s: float
    reason: str
    evidence: tuple[str, ...]
    ranks: tuple[RankStatus, ...]
    score: int
    stacks: str | None = None


@dataclass(slots=True)
class _Learnt:
    compute: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    data: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    checkpoint: float = 0.0
    evaluation: float = 0.0
    startup: float = 0.0


class HangDetector:
    """Learns from every page it is shown; ``check`` and ``verdict`` give its opinion."""

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._learnt = _Learnt()
        self._seen: dict[int, int] = {}
        self._patience: dict[str, float] = {}
        self._tolerated: dict[str, float] = {}
        self._excused: dict[int, tuple[float, str]] = {}
        self._overdue: dict[int, RankStatus] = {}
        self._asked = self._since = -math.inf

    def new_generation(self) -> None:
        """Forget the ranks, keep what was learnt about the run."""
        self._seen.clear()
        self._excused.clear()
        self._overdue.clear()

    def check(self, pages: Mapping[int, RankPage], processes: Mapping[int, str | None], now: float) -> Stall | None:
        """Learn from ``pages`` and say whether the run has stalled; ``now`` and all times in monotonic seconds."""
        if now - self._asked > _PAUSE_S:
            self._since = now
        self._asked = now
        for page in pages.values():
            self._learn(page)
        at_work = [page for page in pages.values() if page.state != "finished"] or list(pages.values())
        standing = [self._status(page, processes.get(page.rank), now) for page in at_work]
        stuck = [rank for rank in standing if rank.stuck_s >= rank.limit_s - SUSPECT_BEFORE_S]
        stuck = [rank for rank in stuck if not any(_may_be_waiting_for(rank, other, stuck) for other in standing)]
        self._learn_tolerated(standing, stuck)
        if not stuck:
            return None
        longest = max(stuck, key=lambda rank: rank.stuck_s - rank.limit_s)
        return Stall(tuple(standing), longest, longest.stuck_s >= longest.limit_s - EARLY_S)

    def rank_statuses(
        self, pages: Mapping[int, RankPage], processes: Mapping[int, str | None], now: float
    ) -> tuple[RankStatus, ...]:
        """Where the ranks stand, without an opinion."""
        return tuple(self._status(page, processes.get(page.rank), now) for page in pages.values())

    def verdict(self, stall: Stall, stacks: Mapping[int, Stack]) -> Hang | None:
        """The hang behind a stall that is due; None if a stack excuses it for now."""
        if self._excuse(stall, stacks):
            return None
        return name_culprit([_with_stack(rank, stacks.get(rank.rank)) for rank in stall.ranks])

    def accept(self, phase: str, score: int) -> None:
        """The ranks will be killed for a hang; be more patient next time if nothing but the time spoke for it."""
        if score < _CERTAIN:
            self._patience[phase] = self._patience.get(phase, 1.0) * FACTOR

    def limit(self, phase: str) -> float:
        """Seconds that a rank may stay unchanged in ``phase`` once it is past its first steps."""
        limit = self._base_limit(phase) * self._patience.get(phase, 1.0)
        return max(limit, self._tolerated.get(phase, 0.0))

    def _base_limit(self, phase: str) -> float:
        learnt, limits = self._learnt, self._limits
        if phase == "setup":
            return max(STARTUP_MIN_S, LONG_FACTOR * learnt.startup) if learnt.startup else limits.startup_s
        if phase == "checkpoint":
            return max(CHECKPOINT_MIN_S, LONG_FACTOR * learnt.checkpoint) if learnt.checkpoint else limits.long_s
        if phase == "evaluation":
            return max(EVALUATION_MIN_S, LONG_FACTOR * learnt.evaluation) if learnt.evaluation else limits.long_s
        if phase == "data":
            return max(limits.data_s, FACTOR * percentile_99(learnt.data))
        return max(limits.steady_s, FACTOR * percentile_99(learnt.compute))

    def _status(self, page: RankPage, process: str | None, now: float) -> RankStatus:
        changed, excuse = page.changed, self._excused.get(page.rank)
        judged_as = page.phase
        if excuse is not None and excuse[0] == changed:
            judged_as = excuse[1]
        elif page.steps_reported < WARM_STEPS and page.phase not in ("checkpoint", "evaluation"):
            judged_as = "setup"
        limit = FINISH_S if page.state == "finished" else self.limit(judged_as)
        if process == "T":
            limit = min(limit, self.limit("other"))
        step = page.last_step.step if page.last_step is not None else None
        stuck_s = now - max(changed, self._since)
        return RankStatus(page.rank, page.phase, judged_as, step, changed, stuck_s, limit, process)

    def _learn(self, page: RankPage) -> None:
        seen = self._seen.get(page.rank, 0)
        fresh = page.steps[-(page.steps_reported - seen) :] if page.steps_reported > seen else ()
        self._seen[page.rank] = page.steps_reported
        first_fresh = page.steps_reported - len(fresh)
        for number, record in enumerate(fresh, start=first_fresh + 1):
            if number == WARM_STEPS:
                self._learnt.startup = max(self._learnt.startup, record.end - page.created)
            if number >= WARM_STEPS:
                self._learn_step(record)

    def _learn_step(self, record: StepRecord) -> None:
        data, checkpoint, evaluation = (record.phase(name) for name in ("data", "checkpoint", "evaluation"))
        self._learnt.compute.append(max(0.0, record.duration_s - data - checkpoint - evaluation))
        self._learnt.data.append(data)
        self._learnt.checkpoint = max(self._learnt.checkpoint, checkpoint)
        self._learnt.evaluation = max(self._learnt.evaluation, evaluation)

    def _learn_tolerated(self, standing: list[RankStatus], stuck: list[RankStatus]) -> None:
        """Remember how long a rank stood still beyond the usual limit of its phase and then went on by itself."""
        for rank in standing:
            before = self._overdue.pop(rank.rank, None)
            if before is not None and before.changed != rank.changed:
                known = self._tolerated.get(before.phase, 0.0)
                self._tolerated[before.phase] = max(known, 1.5 * before.stuck_s)
            elif rank in stuck and rank.judged_as == rank.phase and rank.stuck_s > self._base_limit(rank.phase):
                self._overdue[rank.rank] = rank

    def _excuse(self, stall: Stall, stacks: Mapping[int, Stack]) -> bool:
        excused = False
        for rank in stall.ranks:
            stack = stacks.get(rank.rank)
            phase = stack.busy_as if stack is not None and rank.process not in _STOPPED else None
            if phase is not None and self.limit(phase) > rank.stuck_s + SUSPECT_BEFORE_S:
                self._excused[rank.rank] = (rank.changed, phase)
                excused = True
        return excused


def name_culprit(ranks: Sequence[RankStatus]) -> Hang:
    """The hang of ``ranks``, which have all stood still for too long or wait for one that has."""
    everyone = tuple(ranks)
    scored = [(_score(rank, everyone), rank) for rank in everyone]
    scored.sort(key=lambda pair: (-pair[0][0], pair[1].changed))
    (score, evidence), culprit = scored[0]
    if len(scored) > 1 and score == scored[1][0][0]:
        evidence = [f"all ranks have stood still since the same moment, in {culprit.phase}; none stands out"]
        named = None
    else:
        named = culprit.rank
    who = "no rank stands out" if named is None else f"rank {named}"
    reason = f"{who}: {evidence[0]}" if evidence else f"{who} has stood still in {culprit.phase}"
    return Hang(
        named, culprit.phase, culprit.step, culprit.stuck_s, culprit.limit_s, reason, tuple(evidence), everyone, score
    )


def is_hang(ranks: Sequence[RankStatus]) -> bool:
    """True if some rank has reached its limit and does not wait for one that is still within its own."""
    stuck = [rank for rank in ranks if rank.stuck_s >= rank.limit_s - EARLY_S]
    return any(not any(_may_be_waiting_for(rank, other, stuck) for other in ranks) for rank in stuck)


def _with_stack(rank: RankStatus, stack: Stack | None) -> RankStatus:
    waits = rank.phase == "collective" or (stack is not None and stack.in_collective is not None)
    return replace(rank, waits=waits, where=str(stack.main[0]) if stack is not None and stack.main else "")


def _may_be_waiting_for(rank: RankStatus, other: RankStatus, stuck: Sequence[RankStatus]) -> bool:
    """True if ``other``, still within its limit, may be what holds ``rank`` up.

    A rank that is itself in a collective waits for somebody, so it holds nobody up but others in collectives. A
    stopped process waits for nobody.
    """
    if rank.process == "T" or other.rank == rank.rank or other in stuck or other.progress > rank.progress:
        return False
    return other.phase != "collective" or rank.phase == "collective"


_CERTAIN = 50


def _score(rank: RankStatus, everyone: tuple[RankStatus, ...]) -> tuple[int, list[str]]:
    """How much speaks for ``rank`` as the culprit, and what."""
    score, evidence = 0, []
    others = [other for other in everyone if other.rank != rank.rank]
    if rank.process is None or rank.process in _STOPPED:
        score += 2 * _CERTAIN
        evidence.append(f"its process is {_STOPPED.get(rank.process or 'X')} (state {rank.process or 'gone'})")
    elif rank.process == "D":
        score += _CERTAIN
        evidence.append("its process is in uninterruptible sleep (state D), waiting for a device or a file system")
    if others and all(rank.progress < other.progress for other in others):
        score += 20
        done = "no step" if rank.step is None else f"step {rank.step}"
        evidence.append(f"it has completed {done}, all others are further")
    waiting = [other for other in others if other.waits]
    if waiting and not rank.waits:
        score += 10
        evidence.append(f"it is in {rank.phase} while {_ranks(waiting)} in a collective")
    if others and all(rank.changed < other.changed - _APART_S for other in others):
        score += 5
        first = min(other.changed for other in others) - rank.changed
        evidence.append(f"it stopped changing {first:.1f} s before any other rank")
    if not others:
        score += 1
        evidence.append(
            f"it has stood still in {rank.phase} for {rank.stuck_s:.1f} s; the limit is {rank.limit_s:.1f} s"
        )
    if evidence and rank.where:
        evidence.append(f"its main thread is in {rank.where}")
    return score, evidence


def _ranks(ranks: list[RankStatus]) -> str:
    numbers = [str(rank.rank) for rank in sorted(ranks, key=lambda rank: rank.rank)]
    return f"rank {numbers[0]} waits" if len(numbers) == 1 else f"ranks {', '.join(numbers)} wait"


def percentile_99(values: deque[float]) -> float:
    """The 99th percentile by nearest rank, 0 without values."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else 0.0
