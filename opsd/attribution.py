"""Which rank blocks a hung job, from each rank's page, process and stack.

In synchronous training every rank stops when one does, so the question is which rank made the others wait. The
launcher asks it when it detects a hang, the runbooks ask it for runs without a launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TRACED = "t"
STOPPED = {
    "T": "stopped by a signal",
    TRACED: "stopped by a debugger",
    "Z": "a zombie",
    "X": "dead",
}
UNINTERRUPTIBLE = "D"

_PROGRESS = {"data": 1, "forward": 2, "backward": 2, "collective": 3, "optimizer": 4}
"""How far into a step a phase lies. Forward and backward alternate under gradient accumulation, so they are equal;
checkpoint, evaluation and everything else come before the step's first batch."""

_APART_S = 0.5
"""Ranks whose last changes are closer together than this, in seconds, stopped together."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank of a hung job: ``stuck_s`` seconds since it changed, ``step`` the last completed (-1: none).

    ``waits``: its stack is in a collective, whatever its phase.
    """

    rank: int
    phase: str
    stuck_s: float
    process: str | None
    step: int
    waits: bool = False

    @property
    def in_collective(self) -> bool:
        """Whether it waits for other ranks."""
        return self.waits or self.phase == "collective"


@dataclass(frozen=True, slots=True)
class Attribution:
    """The rank that blocks the others, the reason, and the confidence (0 to 1)."""

    rank: int
    reason: str
    confidence: float
    evidence: tuple[str, ...]


INCONCLUSIVE = 0.2
"""The confidence with which a rank is named when none stands out."""

Rule = Callable[[Sequence[RankState]], tuple[Sequence[RankState], str]]


def _gone(ranks: Sequence[RankState]) -> tuple[Sequence[RankState], str]:
    return [r for r in ranks if r.process is None], "its process is gone"


def _stopped(ranks: Sequence[RankState]) -> tuple[Sequence[RankState], str]:
    found = [r for r in ranks if r.process in STOPPED]
    return found, f"its process is {STOPPED[found[0].process or '']}" if found else ""


def _in_the_kernel(ranks: Sequence[RankState]) -> tuple[Sequence[RankState], str]:
    found = [r for r in ranks if r.process == UNINTERRUPTIBLE]
    return found, "its process is in a system call that cannot be interrupted (a driver or a disk)"


def _lowest_step(ranks: Sequence[RankState]) -> tuple[Sequence[RankState], str]:
    lowest = min(r.step for r in ranks)
    return [r for r in ranks if r.step == lowest], f"it has completed step {lowest}, the others are further"


def _not_waiting(ranks: Sequence[RankState]) -> tuple[Sequence[RankState], str]:
    found = [r for r in ranks if not r.in_collective]
    return found, f"it is in phase {found[0].phase}, the others wait for it in collective" if found else ""


def _least_progress(ranks: Sequence[RankState]) -> tuple[Sequence[RankState], str]:
    lowest = min(_PROGRESS.get(r.phase, 0) for r in ranks)
    found = [r for r in ranks if _PROGRESS.get(r.phase, 0) == lowest]
    others = sorted({r.phase for r in ranks} - {r.phase for r in found})
    return found, f"it is in phase {found[0].phase}, the others wait for it in {' and '.join(others)}"


_RULES: tuple[tuple[Rule, float], ...] = (
    (_gone, 0.95),
    (_stopped, 0.95),
    (_in_the_kernel, 0.8),
    (_lowest_step, 0.9),
    (_not_waiting, 0.85),
    (_least_progress, 0.85),
)


def attribute_hang(ranks: Sequence[RankState]) -> Attribution:
    """The rank that blocks the others. ``ranks`` are those of one run and generation, at least one.

    Each rule narrows the suspects that the ones before it left; the first that narrows decides how sure the answer is.
    Among ranks that look alike the one that changed first is named, with little confidence. If all wait in one
    collective, the cause may be the network or a rank on another node.
    """
    ranks = sorted(ranks, key=lambda r: r.rank)
    suspects, reasons, confidence = list(ranks), list[str](), 0.0
    for rule, sure in _RULES:
        found, reason = rule(suspects)
        if 0 < len(found) < len(suspects):
            suspects, confidence = list(found), confidence or sure
            reasons.append(reason)
    culprit = max(suspects, key=lambda r: r.stuck_s)
    waiting = all(r.in_collective for r in suspects)
    if len(ranks) == 1:
        certain = not waiting or culprit.process in STOPPED
        reasons, confidence = ["it is the only rank here"], 0.9 if certain else INCONCLUSIVE
    elif len(suspects) > 1:
        apart = culprit.stuck_s - max(r.stuck_s for r in suspects if r is not culprit) > _APART_S
        reasons.append("its page stopped changing first" if apart else "no rank stands out")
        confidence = confidence or (0.5 if apart and not waiting else INCONCLUSIVE)
    return Attribution(
        rank=culprit.rank,
        reason="; ".join(reasons),
        confidence=confidence,
        evidence=tuple(_sentence(r) for r in sorted(ranks, key=lambda r: r is not culprit)),
    )


def _sentence(rank: RankState) -> str:
    process = "gone" if rank.process is None else f"in state {rank.process}"
    done = "no step completed" if rank.step < 0 else f"step {rank.step} completed"
    return f"rank {rank.rank}: {rank.phase} for {rank.stuck_s:.1f} s, process {process}, {done}"
