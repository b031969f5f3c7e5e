"""What a generation's ranks left behind when they failed."""

from __future__ import annotations

import time

from opsd.launch.io.events import EventLog
from opsd.launch.ranks.failure import Failure, RankError, Stop, classify
from opsd.launch.ranks.ranks import Generation, Rank

AT_ONCE_S = 60.0
"""A failure so soon after the first start of a run was no accident on the way."""
PROGRAM_NOT_FOUND = "ProgramNotFound"
"""The error type with which ``worker.py`` says that there is nothing to run."""


def failures(generation: Generation) -> list[tuple[Failure, Rank]]:
    """The ranks that have ended badly, and those that have left an error and are on their way out."""
    found = []
    for rank in generation.ranks:
        if rank.exit is not None and rank.exit.ok:
            continue
        left = rank.error()
        if rank.exit is None and left is None:
            continue
        at_once = generation.number == 1 and (rank.ended or time.monotonic()) - generation.started < AT_ONCE_S
        found.append((_failure(rank, left, at_once), rank))
    return found


def _failure(rank: Rank, left: tuple[RankError, float] | None, at_once: bool) -> Failure:
    page = rank.page()
    error, t = left if left is not None else (None, _wall(rank.ended or time.monotonic()))
    exit = str(rank.exit) if rank.exit is not None else "exit code 1"
    return Failure(
        rank.rank,
        exit,
        classify(exit, error, rank.log_tail()),
        t,
        page.last_step.step if page is not None and page.last_step is not None else None,
        page.phase if page is not None else None,
        error,
        at_once=at_once,
    )


def report_exit(events: EventLog, rank: Rank, failure: Failure, *, culprit: bool) -> None:
    """Write the ``rank_exited`` event of a failed rank."""
    page, error = rank.page(), failure.error
    last = page.last_step if page is not None else None
    events.emit(
        "rank_exited",
        rank=rank.rank,
        pid=rank.child.pid,
        exit=failure.exit,
        step=failure.step,
        phase=failure.phase,
        culprit=culprit,
        error=None if error is None else {"type": error.type, "message": error.message, "where": error.where},
        log_tail=rank.log_tail(),
        last_step_t=None if last is None else round(_wall(last.end), 4),
        noticed_s=round(rank.noticed_s, 4),
    )


def explain(stop: Stop, cause: Failure, node: str, log: str, log_tail: str) -> str:
    """Why the run stops, in one paragraph: the rule, the rank, its error, its log and how that ends."""
    step = "before its first step" if cause.step is None else f"after step {cause.step}"
    tail = "\n".join(f"    {line}" for line in log_tail.splitlines()[-10:])
    return f"stopped: {stop.reason}. Rank {cause.rank} on {node} failed {step} with {cause.cause}. Its log is {log}" + (
        f"; it ends in\n{tail}" if tail else "."
    )


def _wall(monotonic: float) -> float:
    return time.time() - time.monotonic() + monotonic
