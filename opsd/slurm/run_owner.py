"""Which claim of a run a new start may replace, and which one still has a living owner."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from opsd import exitcodes
from opsd.checkpoints import claims
from opsd.checkpoints.claims import Claim, ClaimError
from opsd.slurm.port import Job, SlurmError
from opsd.slurm.requeue import is_stopping

REPLACES = "OPSD_REPLACES"
"""The number that ``replaceable`` has returned to the batch script, for the launchers that it starts."""
WATCH_S = 4.0
"""A lease that does not change for so long is that of a dead leader, who renews it once a second."""
POLL_S = 0.25
STOPPING_S = 120.0
"""A job that Slurm is stopping has so long to release the run."""
FOLDER_S = 60.0
_PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN)
_START = re.compile(r"(?P<run>.*), job (?P<job>[^,.]*)\.(?P<count>\d+)(, .*)?")


class RunOwnedError(Exception):
    """Another job or launcher has the run; the message names it and what to do."""


def is_older(start: str, than: str) -> bool:
    """Whether ``start`` is an earlier requeue of the same Slurm job as ``than``."""
    one, other = _START.fullmatch(start), _START.fullmatch(than)
    if one is None or other is None or (one["run"], one["job"]) != (other["run"], other["job"]):
        return False
    return int(one["count"]) < int(other["count"])


def replaceable(
    folder: Path,
    start: str,
    jobs: Callable[[Sequence[int]], Sequence[Job]],
    *,
    take_over: bool = False,
    dead: str = "",
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """The number of the newest claim in ``folder``, which the run with this ``start`` may replace; 0 without one.

    A claim of another start has an owner while ``jobs`` (see ``Slurm.jobs``) shows its job, or while its lease changes.
    ``dead`` is a launcher, ``NODE-PID``, that the kernel says is dead: nothing is left of a run that it had alone.
    Raises RunOwnedError, unless ``take_over``, and ClaimError.
    """
    newest = _newest(folder, clock, sleep)
    if newest is None:
        return 0
    of_this_start = newest.start == start or newest.start.startswith(f"{start}, ")
    is_dead = newest.alone and newest.launcher.rpartition("-")[0] == dead
    if take_over or is_dead or of_this_start or is_older(newest.start, start) or is_older(start, newest.start):
        return newest.number
    job = _owner(newest, start, jobs)
    if newest.end is not None:
        if newest.end.code == exitcodes.REQUEUE and job is not None and job.state == "pending":
            raise RunOwnedError(_refusal(folder, f"belongs to job {job.id}, which waits in the queue to go on with it"))
        return newest.number
    if job is not None and not is_stopping(job):
        where = f" on {job.batch_host}" if job.batch_host else ""
        raise RunOwnedError(_refusal(folder, f"is being run by job {job.id} ({job.state}{where})"))
    _wait_for_release(folder, newest, STOPPING_S if job is not None else 0.0, clock, sleep)
    return newest.number


def _wait_for_release(
    folder: Path, newest: Claim, patience_s: float, clock: Callable[[], float], sleep: Callable[[float], object]
) -> None:
    """Return once the lease has not changed for ``WATCH_S``, or the run has ended; a change is borne for a while."""
    began = changed = clock()
    lease = claims.lease(folder)
    while clock() - changed < WATCH_S:
        sleep(POLL_S)
        if (now := claims.lease(folder)) == lease:
            continue
        latest = claims.newest(folder)
        if latest is not None and latest.end is not None:
            return
        lease, changed = now, clock()
        if changed - began > patience_s:
            node = newest.launcher.rsplit("-", 2)[0]
            owner = _START.fullmatch(newest.start)
            who = f"job {owner['job']}" if owner is not None else f"a launcher on {node}"
            raise RunOwnedError(_refusal(folder, f"is being run by {who}: its lease is renewed"))


def _newest(folder: Path, clock: Callable[[], float], sleep: Callable[[float], object]) -> Claim | None:
    """The newest claim; a file server that restarts answers with errors for a while. Raises ClaimError."""
    deadline = clock() + FOLDER_S
    while True:
        try:
            return claims.newest(folder)
        except ClaimError as error:
            if error.errno not in _PASSING or clock() >= deadline:
                raise
        sleep(POLL_S)


def _owner(newest: Claim, start: str, jobs: Callable[[Sequence[int]], Sequence[Job]]) -> Job | None:
    """The job of the claim if Slurm still knows it, and it is another one than that of ``start``."""
    owner, own = _START.fullmatch(newest.start), _START.fullmatch(start)
    if owner is None or not owner["job"].isdecimal() or (own is not None and own["job"] == owner["job"]):
        return None
    with suppress(SlurmError):
        return next(iter(jobs([int(owner["job"])])), None)
    return None


def _refusal(folder: Path, why: str) -> str:
    return (
        f"the run in {folder} {why}; give this one another name with --run-id (or #SBATCH --job-name), or stop that "
        "one and continue its run with --take-over"
    )
