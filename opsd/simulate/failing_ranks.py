"""What launchers tell the leader of ranks that fail or hang, one rank for each node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opsd.launch.hangs.culprit import EARLY_S, RankStatus
from opsd.launch.hangs.limits import FACTOR, HangLimits
from opsd.launch.ranks.failure import Failure, RankError
from opsd.launch.run.messages import FailedRank, RankStatuses
from opsd.simulate.faults import Fault

_LINK: Final = RankError("DistBackendError", "NCCL error: remote process exited or there was a network error", "")


def hang_limit_s(step_s: float) -> float:
    """The limit of ranks whose steps take ``step_s``, all of it in one phase."""
    return max(HangLimits().steady_s, FACTOR * step_s)


def hang_judged_s(step_s: float) -> float:
    """From the last step to the judgement."""
    return hang_limit_s(step_s) - EARLY_S


def failed(rank: int, fault: Fault, step: int | None, *, at_once: bool) -> FailedRank:
    """How ``fault`` ends ``rank``, after ``step`` or, ``at_once``, before its first step."""
    if fault.effect == "process":
        return FailedRank(Failure(rank, "signal SIGSEGV", "signal", 0.0, step))
    if fault.effect == "link":
        return FailedRank(Failure(rank, "exit code 1", "communication", 0.0, step, error=_LINK))
    error = RankError(fault.kind, "CUDA initialization" if at_once else "CUDA error", "")
    return FailedRank(Failure(rank, "exit code 1", "hardware", 0.0, step, error=error, at_once=at_once))


def hung_statuses(generation: int, slots: Sequence[str], hung: str, step: int, step_s: float) -> list[RankStatuses]:
    """What each node of ``slots`` answers: the rank of ``hung`` is in its backward pass, all others wait for it."""
    limit_s = hang_limit_s(step_s)
    stuck_s = hang_judged_s(step_s)
    return [
        RankStatuses(
            generation,
            (
                RankStatus(
                    rank, phase := "backward" if name == hung else "collective", phase, step, stuck_s, stuck_s,
                    limit_s, "S",
                ),
            ),
            None,
        )
        for rank, name in enumerate(slots)
    ]  # fmt: skip
