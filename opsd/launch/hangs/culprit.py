"""Names the rank behind a hang, from the statuses of all ranks. Pure; shares its rules with the agent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from opsd.attribution import INCONCLUSIVE, STOPPED, UNINTERRUPTIBLE, RankState, attribute_hang
from opsd.collectors.lib.nccl.desync import Desync
from opsd.launch.hangs.limits import UNKNOWN

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
