"""Tells a hang from slow progress. Pure: what is observed of the ranks and the time are arguments.

How long a rank may stay unchanged depends on its phase and is learned from the run:

=====================================  ==========================================================================
phase                                  limit
=====================================  ==========================================================================
until ``WARM_STEPS`` steps are done    ``startup_s`` (loading, compiling), later 5 x the longest start seen, >= 60 s
data                                   3 x p99 of the waits seen, >= ``data_s``: the agent repairs a stalled loader
checkpoint, evaluation                 5 x the longest seen, >= 60 s and 120 s; before the first ``long_s``
all others                             3 x p99 of the step time without the phases above, >= ``steady_s``;
                                       >= ``unannounced_s`` if the program does not report what it does
=====================================  ==========================================================================

A process stopped by a signal has ``steady_s`` in every phase, one that does nothing at all ``idle_s`` at most. One that
a debugger has stopped, and one that waits for a person or for requests (pdb, a prompt, an event loop), has ``long_s``.
A rank without a page is judged by that alone. A rank that waits for another is not judged while that other one is
within its own limit. Stacks, file writes and GPUs can excuse a rank, whatever it reported. One that is seen to compile,
evaluate, save, download or sleep gets ``recognised_s`` at least. So does one with a GPU, or with processes of its own,
at work. One whose GPU spins waits for other ranks, wherever its main thread is.
After a hang with no evidence but the elapsed time, the limit of its phase is tripled. A slow operation then succeeds at
a later attempt, and its duration is remembered.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from opsd.attribution import INCONCLUSIVE, STOPPED, TRACED, UNINTERRUPTIBLE, RankState, attribute_hang
from opsd.collectors.lib.nccl.desync import Desync
from opsd.launch.hangs.capture import Stack
from opsd.launch.hangs.gpus import GpuState, GpuUse
from opsd.launch.hangs.limits import INPUT, UNKNOWN, WARM_STEPS, HangLimits, LearntLimits
from opsd.rank_page import RankPage

EARLY_S = 0.3
"""A hang is declared this long before the limit, so that the event is published in time."""
CERTAIN = 50
"""Evidence of this weight is more than elapsed time."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The state of one rank. ``process`` is the kernel's state letter, None if the process is gone.

    ``judged_as`` is the phase whose limit applies; it differs from ``phase`` for a rank that starts, or that a stack
    excused, and is "idle" if ``stuck_s`` counts since its processes did anything at all. ``waits``: by its phase or
    stack, or by what spins on its GPU, it is in a collective; ``where`` is the innermost frame of its main thread.
    ``gpu`` says what its GPU does, "" if that is not known.
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
    gpu: str = ""

    @property
    def progress(self) -> int:
        """The last completed step, -1 before the first."""
        return -1 if self.step is None else self.step

    @property
    def overdue(self) -> bool:
        """Whether it has reached its limit."""
        return self.stuck_s >= self.limit_s - EARLY_S

    @property
    def in_collective(self) -> bool:
        """Whether it waits for other ranks."""
        return self.waits or self.phase == "collective"


@dataclass(frozen=True, slots=True)
class Hang:
    """A verdict. ``rank`` is None if no rank stands out; ``evidence`` are sentences, ``score`` is their weight.

    ``stacks`` is the file with the stacks of the ranks, None if it could not be written. ``recorder`` is what the
    flight recorders say, None if they say nothing.
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
    recorder: Desync | None = None


def is_hang(ranks: Sequence[RankStatus]) -> bool:
    """True if some rank has reached its limit and does not wait for one within its own."""
    stuck = {rank for rank in ranks if rank.overdue}
    return any(not any(may_be_waiting_for(rank, other, stuck) for other in ranks) for rank in stuck)


def may_be_waiting_for(rank: RankStatus, other: RankStatus, stuck: Collection[RankStatus]) -> bool:
    """True if ``other``, still within its limit, may be what ``rank`` waits for.

    A rank in a collective waits itself, so only ranks in collectives can wait for it. A stopped process waits for
    nobody. A rank that has a page waits no longer for one that has none than that one may be idle.
    """
    if rank.process == "T" or other.rank == rank.rank or other in stuck or other.progress > rank.progress:
        return False
    if other.phase == UNKNOWN != rank.phase and rank.stuck_s >= max(rank.limit_s, other.limit_s) - EARLY_S:
        return False
    return not other.in_collective or rank.in_collective


def name_culprit(ranks: Sequence[RankStatus]) -> Hang:
    """The hang of ``ranks``, which have all exceeded their limits or wait for one that has."""
    everyone, newest = tuple(ranks), max(rank.changed for rank in ranks)
    verdict = attribute_hang([_state(rank, newest) for rank in everyone])
    culprit = next(rank for rank in everyone if rank.rank == verdict.rank)
    others = [rank for rank in everyone if rank is not culprit]
    named = culprit.rank if verdict.confidence > INCONCLUSIVE or not others else None
    certain = culprit.process is None or culprit.process in (*STOPPED, UNINTERRUPTIBLE)
    evidence = _evidence(culprit, others) if named is not None else []
    if named is None:
        evidence = [f"all ranks have stood still since the same moment, in {culprit.phase}; none stands out"]
    who = "no rank stands out" if named is None else f"rank {named}"
    return Hang(
        named,
        culprit.phase,
        culprit.step,
        culprit.stuck_s,
        culprit.limit_s,
        f"{who}: {evidence[0]}" + (f", in {culprit.where}" if named is not None and culprit.where else ""),
        tuple(evidence),
        everyone,
        CERTAIN if certain else 0,
    )


def _state(rank: RankStatus, newest: float) -> RankState:
    return RankState(rank.rank, rank.phase, newest - rank.changed, rank.process, rank.progress, rank.waits)


def _evidence(rank: RankStatus, others: Sequence[RankStatus]) -> list[str]:
    """What speaks against ``rank``, the strongest first."""
    evidence = []
    if rank.process is None or rank.process in STOPPED:
        evidence.append(f"its process is {STOPPED.get(rank.process or 'X')} (state {rank.process or 'gone'})")
    elif rank.process == UNINTERRUPTIBLE:
        evidence.append("its process is in uninterruptible sleep (state D), waiting for a device or a file system")
    if others and all(rank.progress < other.progress for other in others):
        done = "no step" if rank.step is None else f"step {rank.step}"
        evidence.append(f"it has completed {done}, all others are further")
    waiting = [other for other in others if other.in_collective]
    if waiting and not rank.in_collective:
        what = "it is in no collective" if rank.phase == UNKNOWN else f"it is in {rank.phase}"
        evidence.append(f"{what} while {_ranks(waiting)} in a collective")
    first = min((other.changed for other in others), default=rank.changed) - rank.changed
    if first >= 0.1:
        evidence.append(f"it stopped changing {first:.1f} s before any other rank")
    if not evidence:
        evidence.append(
            f"it has stood still in {rank.phase} for {rank.stuck_s:.1f} s; the limit is {rank.limit_s:.1f} s"
        )
    if rank.judged_as == "idle":
        evidence.append(f"its processes have used no CPU time and moved no data for {rank.stuck_s:.0f} s")
    if rank.gpu:
        evidence.append(rank.gpu)
    if rank.where:
        evidence.append(f"its main thread is in {rank.where}")
    return evidence


def _ranks(ranks: Sequence[RankStatus]) -> str:
    numbers = [str(rank.rank) for rank in sorted(ranks, key=lambda rank: rank.rank)]
    return f"rank {numbers[0]} waits" if len(numbers) == 1 else f"ranks {', '.join(numbers)} wait"


SUSPECT_BEFORE_S = 2.5
"""A stall is examined this long before its limit, so that the stacks are available when it is reached."""
_PAUSE_S = 3.0
"""Without a check for so long the launcher itself was stopped (a suspended job), and the time starts again."""
COMPANION_S = 3600.0
"""For how long a companion that works excuses a rank that does not change."""
_NO_GPUS: Mapping[int, GpuUse] = {}
_STILL_WAITS_S = 20.0
"""For how long a stack says of a rank that moves, or has no page, whether it waits in a collective."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One rank as it is seen now; ``page`` is None if it has none. ``process`` as in ``RankStatus``.

    ``active`` is the monotonic second in which its processes were last seen to do anything, and they did nothing from
    then until ``seen``. ``writing``: they write files.
    """

    rank: int
    page: RankPage | None
    process: str | None
    active: float
    seen: float
    writing: bool = False


@dataclass(frozen=True, slots=True)
class Stall:
    """Ranks that have not changed for suspiciously long; ``due`` once one of them has reached its limit."""

    ranks: tuple[RankStatus, ...]
    longest: RankStatus
    due: bool


class HangDetector:
    """Judges the ranks given to ``check``, with limits that it learns from their pages."""

    def __init__(self, limits: HangLimits) -> None:
        self.limits = LearntLimits(limits)
        self._excused: dict[int, tuple[float, str]] = {}
        self._waits: dict[int, tuple[float, float, bool]] = {}
        self._overdue: dict[int, RankStatus] = {}
        self._traced: dict[int, float] = {}
        """When a rank was last seen in a debugger; its time starts again after that."""
        self._writing: frozenset[int] = frozenset()
        self._busy: frozenset[int] = frozenset()
        self._by_idleness = False
        self._at_work: frozenset[int] = frozenset()
        self._asked = self._since = self._served = -math.inf

    def new_generation(self) -> None:
        """Forget the ranks, keep the learned limits."""
        self.limits.new_generation()
        self._excused.clear()
        self._waits.clear()
        self._traced.clear()
        self._at_work = frozenset()
        self._overdue.clear()

    def companion_works(self, at: float) -> None:
        """A companion of the run worked at the monotonic second ``at``: ranks may wait for it."""
        self._served = at

    def check(self, ranks: Sequence[Observation], now: float) -> Stall | None:
        """Learn from the pages and return a stall if there is one; times in monotonic seconds."""
        if now - self._asked > _PAUSE_S:
            self._since = now
        self._asked = now
        for rank in ranks:
            if rank.page is not None:
                self.limits.learn(rank.page)
            if rank.process == TRACED:
                self._traced[rank.rank] = now
        self._writing = frozenset(rank.rank for rank in ranks if rank.writing)
        self._busy = frozenset(rank.rank for rank in ranks if rank.active >= rank.seen)
        at_work = [rank for rank in ranks if rank.page is None or rank.page.state != "finished"] or list(ranks)
        numbers = frozenset(rank.rank for rank in at_work)
        if self._at_work - numbers:
            self._since = now  # others may have waited for a rank that has ended
        self._at_work = numbers
        standing = list(self.rank_statuses(at_work, now))
        late = [rank for rank in standing if rank.stuck_s >= rank.limit_s - SUSPECT_BEFORE_S]
        stuck = [rank for rank in late if self._suspicious(rank, standing, late, now)]
        self._learn_tolerated(standing, stuck)
        if not stuck:
            return None
        longest = max(stuck, key=lambda rank: rank.stuck_s - rank.limit_s)
        return Stall(tuple(standing), longest, longest.overdue)

    def _suspicious(self, rank: RankStatus, standing: list[RankStatus], late: list[RankStatus], now: float) -> bool:
        """Whether ``rank`` waits for nobody, or only stacks can tell: those it may wait for may wait themselves."""
        excuses = [other for other in standing if may_be_waiting_for(rank, other, late)]
        return not excuses or (not rank.in_collective and all(self._waits_unknown(other, now) for other in excuses))

    def rank_statuses(self, ranks: Sequence[Observation], now: float) -> tuple[RankStatus, ...]:
        """The status of each rank, without a verdict."""
        return tuple(self._status(rank, now) for rank in ranks)

    def verdict(self, stall: Stall, stacks: Mapping[int, Stack], gpus: Mapping[int, GpuUse] = _NO_GPUS) -> Hang | None:
        """The hang behind a stall that is due; None if a stack or a GPU excuses it for now."""
        if self._excuse(stall, stacks, gpus):
            return None
        ranks = [_with_evidence(rank, stacks.get(rank.rank), gpus.get(rank.rank)) for rank in stall.ranks]
        self._waits.update({rank.rank: (rank.changed, self._asked, rank.waits) for rank in ranks})
        if not is_hang(ranks):
            return None
        self._by_idleness = stall.longest.judged_as == "idle"
        return name_culprit(ranks)

    def accept(self, phase: str, score: int) -> None:
        """The ranks are killed for a hang; allow more time next time if only the elapsed time spoke for it."""
        if score < CERTAIN:
            self.limits.more_patience(UNKNOWN if self._by_idleness else phase)

    def _status(self, rank: Observation, now: float) -> RankStatus:
        page, idle_limit = rank.page, self.limits.limit(UNKNOWN)
        if page is None:
            changed, phase, judged_as, step, limit = rank.active, UNKNOWN, "idle", None, idle_limit
        else:
            changed, phase, step = page.changed, page.phase, page.last_step.step if page.last_step else None
            judged_as, limit = self._page_limit(page)
        if rank.process == "T":
            limit = min(limit, self.limits.limit("other"))
        elif rank.process == TRACED or self._excused.get(rank.rank) == (changed, INPUT):
            limit, idle_limit = (max(each, self.limits.recognised(INPUT)) for each in (limit, idle_limit))
        freed = -math.inf if rank.process == TRACED else self._traced.get(rank.rank, -math.inf)
        served = self._served if rank.process != "T" and self._served - changed < COMPANION_S else -math.inf
        begun = max(changed, self._since, freed, served)
        stuck_s, idle_s = now - begun, rank.seen - max(begun, rank.active)
        if page is None:
            stuck_s = idle_s
        elif page.state != "finished" and idle_limit - idle_s < limit - stuck_s:
            judged_as, stuck_s, limit = "idle", idle_s, idle_limit
        waits = self._known_to_wait(rank.rank, changed, phase, now)
        return RankStatus(rank.rank, phase, judged_as, step, changed, stuck_s, limit, rank.process, bool(waits))

    def _page_limit(self, page: RankPage) -> tuple[str, float]:
        """The phase as which a rank is judged, and its limit."""
        excuse = self._excused.get(page.rank)
        if excuse is not None and excuse[0] == page.changed:
            return excuse[1], self.limits.recognised(excuse[1])
        starts = page.steps_reported < WARM_STEPS and page.phase not in ("checkpoint", "evaluation")
        return "setup" if starts else page.phase, self.limits.page_limit(page)

    def _known_to_wait(self, rank: int, changed: float, phase: str, now: float) -> bool | None:
        """Whether a stack has shown the rank in a collective where it still is; None if that is not known."""
        seen = self._waits.get(rank)
        if seen is None or (phase != UNKNOWN and seen[0] == changed):
            return seen[2] if seen is not None else None
        return seen[2] if now - seen[1] <= _STILL_WAITS_S else None

    def _waits_unknown(self, rank: RankStatus, now: float) -> bool:
        return self._known_to_wait(rank.rank, rank.changed, rank.phase, now) is None

    def _learn_tolerated(self, standing: list[RankStatus], stuck: list[RankStatus]) -> None:
        """Remember how long a rank stood still beyond the usual limit of its phase before it went on."""
        for rank in standing:
            before = self._overdue.pop(rank.rank, None)
            if before is not None and before.changed != rank.changed:
                self.limits.tolerate(before.phase, 1.5 * before.stuck_s)
            elif rank in stuck and rank.judged_as == rank.phase and rank.stuck_s > self.limits.usual(rank.phase):
                self._overdue[rank.rank] = rank

    def _excuse(self, stall: Stall, stacks: Mapping[int, Stack], gpus: Mapping[int, GpuUse]) -> bool:
        """Grant a rank that is seen at work the limit of that work; False if there is none or that has passed too."""
        excused = False
        if stall.longest.process in STOPPED:
            return False
        for rank in stall.ranks:
            if rank.process in STOPPED:
                continue
            phase = self._work(rank, stacks.get(rank.rank), gpus.get(rank.rank))
            if rank.judged_as == "idle" and phase != INPUT:
                continue
            if phase is not None and self.limits.recognised(phase) > rank.stuck_s + SUSPECT_BEFORE_S:
                excused = excused or self._excused.get(rank.rank) != (rank.changed, phase)
                self._excused[rank.rank] = (rank.changed, phase)
        return excused

    def _work(self, rank: RankStatus, stack: Stack | None, gpu: GpuUse | None) -> str | None:
        """The phase of the work that a rank is seen at, None without any.

        One that moves, sleeps, or waits for its GPU or for processes of its own that are at work (the environments of
        an RL program), does so on purpose, unless it is in a collective; ``idle_s`` is its limit if nothing comes of
        it.
        """
        if stack is not None and stack.awaits_input:
            return INPUT
        if stack is not None and (phase := stack.busy_as) is not None:
            return phase
        if rank.rank in self._writing and not (stack is not None and stack.in_collective):
            return "checkpoint"
        if rank.in_collective or (stack is not None and stack.in_collective):
            return None
        if gpu is not None and gpu.state is GpuState.WORKS:
            return "other"
        if stack is None:
            return None
        purpose = stack.moved or stack.asleep or (rank.rank in self._busy and stack.waits_for_process)
        return "other" if purpose else None


def _with_evidence(rank: RankStatus, stack: Stack | None, gpu: GpuUse | None) -> RankStatus:
    waits = rank.waits if stack is None else stack.in_collective is not None
    spins = gpu is not None and gpu.state is GpuState.SPINS and (stack is None or stack.busy_as is None)
    where = stack.where if stack is not None else ""
    return replace(
        rank,
        waits=waits or rank.phase == "collective" or spins,
        where=where,
        gpu=str(gpu) if gpu is not None else "",
    )
