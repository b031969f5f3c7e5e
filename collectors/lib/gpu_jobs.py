"""Which Slurm jobs have which GPU: what Slurm gave them, and whose processes the driver lists. No rank page is needed.

The kernel is asked only about processes that hold a GPU, and about each of them once in a while: its control group
names the job where Slurm makes such groups. Where it makes none, the job in the environment of the process counts if
Slurm runs it here for the same user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from opsd.collectors.lib.occupancy import RENEW_S, Occupancy
from opsd.collectors.lib.processes import Identity, identify, start_time

ENVIRONMENT_BYTES: Final = 256 << 10
"""Of a process's environment no more is read; Slurm puts its variables in front of most."""
_JOB_ID: Final = b"SLURM_JOB_ID="


class _Known(NamedTuple):
    """A process: its start in clock ticks since boot, whose it is, the job that its environment names, until when."""

    start: int
    identity: Identity
    claimed: str
    until: float


class GpuJobs:
    """The jobs on this node's GPUs by the word of Slurm, kernel and driver in ``occupancy``. ``proc`` is procfs."""

    def __init__(
        self, occupancy: Occupancy, *, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._occupancy, self._proc, self._clock = occupancy, proc, clock
        self._known: dict[int, _Known] = {}

    def look(self) -> Mapping[int, frozenset[str]]:
        """The jobs of each GPU by its index. GPUs of no job are left out."""
        held = self._held()
        found: dict[int, set[str]] = {}
        for job, gpus in (*held.items(), *self._given(held).items()):
            for gpu in gpus:
                found.setdefault(gpu, set()).add(job)
        return {gpu: frozenset(jobs) for gpu, jobs in sorted(found.items())}

    def _given(self, held: Mapping[str, frozenset[int]]) -> Mapping[str, frozenset[int]]:
        """The GPUs that Slurm gave each job, none if its indexes are not the driver's.

        They are not where Slurm counts MIG instances, and where ``gres.conf`` lists the devices in another order: then
        there are more of them than GPUs, or a job is seen on others than its own.
        """
        if self._occupancy.instances:
            return {}
        given, known = self._occupancy.allocated, self._occupancy.holders.keys() | self._occupancy.worked.keys()
        return given if all(held.get(job, frozenset()) <= gpus <= known for job, gpus in given.items()) else {}

    def _held(self) -> dict[str, frozenset[int]]:
        """The GPUs on which each job has processes."""
        holders, now = self._occupancy.holders, self._clock()
        self._known = {
            pid: known
            for pid in {pid for pids in holders.values() for pid in pids}
            if (known := self._look_up(pid, now)) is not None
        }
        jobs = self._occupancy.jobs_of = {pid: job for pid, known in self._known.items() if (job := self._job(known))}
        self._occupancy.jobs_on = {
            (gpu, number): frozenset(jobs[pid] for pid in pids if pid in jobs)
            for gpu, instances in self._occupancy.instances.items()
            for number, pids in instances.items()
        }
        found: dict[str, frozenset[int]] = {}
        for gpu, pids in holders.items():
            for job in {jobs[pid] for pid in pids if pid in jobs}:
                found[job] = found.get(job, frozenset()) | {gpu}
        return found

    def _look_up(self, pid: int, now: float) -> _Known | None:
        start = start_time(pid, self._proc)
        known = self._known.get(pid)
        if start is None or (known is not None and known.start == start and now < known.until):
            return known if start is not None else None
        identity = identify(pid, self._proc)
        if identity is None:
            return None
        claimed = "" if identity.job else _job_in_environment(pid, self._proc)
        return _Known(start, identity, claimed, now + RENEW_S)

    def _job(self, known: _Known) -> str:
        user, job = known.identity
        return job or (known.claimed if self._occupancy.confirms(known.claimed, user) else "")


def _job_in_environment(pid: int, proc: Path) -> str:
    """The Slurm job in the environment with which the process began, "" if it has none or may not be read."""
    try:
        with open(proc / str(pid) / "environ", "rb", buffering=0) as file:
            variables = file.read(ENVIRONMENT_BYTES).split(b"\0")
    except OSError:
        return ""
    found = next((entry.removeprefix(_JOB_ID) for entry in variables if entry.startswith(_JOB_ID)), b"")
    return found.decode() if found.isdigit() and found.isascii() else ""
