"""The owners of this node's GPUs by the driver and Slurm. Claims of rank pages are compared with them.

Which Slurm jobs have which GPU: what Slurm gave them, and whose processes the driver lists. No rank page is needed.

The kernel is asked only about processes that hold a GPU, and about each only occasionally. The control group of a
process names the job, if Slurm makes such groups. Where it makes none, the job in the environment of the process counts
if Slurm runs it here for the same user.

A process that uses MIG opens the device files of an instance's capabilities. The ``gpuN`` in a capability's path is not
the N of ``/dev/nvidiaN``: NVIDIA/deepops#1214 shows /dev/nvidia1 with nvidia-cap111, which is ``gpu0/mig/gi12``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from opsd.collectors.lib.processes import Identity, identify, start_time, user_of

RENEW_S: Final = 30.0
"""A process is looked up again after this time: it may have been moved to another control group."""


class GpuOwners:
    """Shared by the collectors of an agent. Each value is replaced as a whole by one thread and read by others.

    ``holders`` are the processes that hold each GPU by index, as the driver lists them; a GPU that is left out is
    unknown. ``worked`` is the monotonic second at which each GPU was last seen with a kernel, the first look at it
    counted as one. ``jobs`` has the user of each job that Slurm runs here, ``sluids`` the job of each SLUID,
    ``allocated`` the GRES indexes of the GPUs that Slurm gave a job, ``shares`` those of them of which it has a part
    beside others, ``jobs_of`` the job of each process that held a GPU when last looked at. ``ranked`` are the GPUs with
    a rank page, each with the page's job. ``instances`` are the processes on each GPU instance of the GPUs with MIG,
    ``jobs_on`` the jobs that these were last seen in, or that Slurm gave it to, by GPU and instance. ``files`` are the
    names of the device files of each GPU or instance that Slurm gave a job, where it has instances.
    """

    def __init__(self, find_user: Callable[[int], int | None] = user_of) -> None:
        self._find_user = find_user
        self.holders: Mapping[int, tuple[int, ...]] = {}
        self.worked: Mapping[int, float] = {}
        self.jobs: Mapping[str, int] = {}
        self.sluids: Mapping[str, str] = {}
        self.allocated: Mapping[str, frozenset[int]] = {}
        self.shares: Mapping[str, frozenset[int]] = {}
        self.files: Mapping[str, Sequence[Sequence[str]]] = {}
        self.jobs_of: Mapping[int, str] = {}
        self.ranked: frozenset[tuple[int, str]] = frozenset()
        self._users: dict[int, tuple[Sequence[int], frozenset[int]]] = {}
        self.instances: Mapping[int, Mapping[int, tuple[int, ...]]] = {}
        self.jobs_on: Mapping[tuple[int, int], frozenset[str]] = {}

    def users_of_gpus(self) -> frozenset[int]:
        """The users whose processes hold a GPU."""
        found = (self._users_on(gpu, pids) for gpu, pids in self.holders.items())
        return frozenset().union(*found)

    def job_on(self, gpu: int, instance: int) -> str:
        """The job on a GPU instance of MIG, "" if there is none, or several."""
        jobs = self.jobs_on.get((gpu, instance), frozenset())
        return next(iter(jobs)) if len(jobs) == 1 else ""

    def may_hold(self, gpu: int, user: int) -> bool:
        """False if nobody holds the GPU, or the driver lists processes on it and all of them are other users'.

        A rank whose page names a GPU is not on it before the driver lists it: until then the claim proves nothing.
        """
        pids = self.holders.get(gpu)
        if pids is None:
            return True
        found = self._users_on(gpu, pids)
        return user in found or (bool(pids) and not found)

    def holds(self, gpu: int, user: int) -> bool:
        """True if the driver lists a process of the user on the GPU."""
        return user in self._users_on(gpu, self.holders.get(gpu, ()))

    def is_taken(self, gpu: int) -> bool:
        """True if the driver lists a process of a known user on the GPU; that of a dead process is not known."""
        return bool(self._users_on(gpu, self.holders.get(gpu, ())))

    def _users_on(self, gpu: int, pids: Sequence[int]) -> frozenset[int]:
        """Whose processes these are. Looked up once for all ranks that ask of the same list."""
        known = self._users.get(gpu)
        if known is None or known[0] is not pids:
            found = frozenset(user for pid in pids if (user := self._find_user(pid)) is not None)
            self._users[gpu] = known = pids, found
        return known[1]

    def number(self, job: str) -> str:
        """The number of a job which the kernel names by that, or by a SLUID; "" for one that Slurm has not told."""
        return job if job.isdecimal() else self.sluids.get(job, "")

    def confirms(self, job: str, user: int) -> bool:
        """True if Slurm runs this job of this user here."""
        return self.jobs.get(job) == user


class Proof:
    """What has been proved about one rank page or run of the user ``owner``, from look to look."""

    def __init__(self, owner: int, gpu_owners: GpuOwners, look_up: Callable[[int], Identity | None] = identify) -> None:
        self._owner, self._gpu_owners, self._look_up = owner, gpu_owners, look_up
        self._process: tuple[int, int] | None = None
        self._identity: Identity | None = None
        self._until = 0.0
        self._held: tuple[int, tuple[int, int] | None] | None = None
        """The GPU on which the process was seen, until others take it."""

    def owns(self, pid: int, start: int, now: float, here: int | None) -> bool | None:
        """Whether the process with this start time is the owner's; None if it is gone and was never seen.

        ``here`` is its number on this machine, None if it is gone.
        """
        if here is None:
            return self._process == (pid, start) or None
        if self._process != (pid, start) or now >= self._until:
            identity = self._look_up(here)
            if identity is None:
                return None
            if identity.user != self._owner:
                return False
            self._process, self._identity, self._until = (pid, start), identity, now + RENEW_S
        return True

    def job(self, claimed: str) -> str:
        """The Slurm job that the process is in; ``claimed`` if Slurm runs it here for the owner; else ""."""
        if self._identity is not None and (job := self._gpu_owners.number(self._identity.job)):
            return job
        return claimed if claimed and self._gpu_owners.confirms(claimed, self._owner) else ""

    def gpu(self, claimed: int | None) -> int | None:
        """``claimed`` unless nobody, or another user's processes, hold that GPU.

        The driver's list empties before a rank that dies is known to be dead. So a rank that was seen on the GPU stays
        on it until others take it.
        """
        if claimed is None:
            return None
        here = claimed, self._process
        if self._gpu_owners.holds(claimed, self._owner):
            self._held = here
        elif self._gpu_owners.is_taken(claimed):
            self._held = None
        return claimed if self._held == here or self._gpu_owners.may_hold(claimed, self._owner) else None


ENVIRONMENT_BYTES: Final = 256 << 10
"""Of a process's environment no more is read; Slurm puts its variables in front of most."""
_JOB_ID: Final = b"SLURM_JOB_ID="
_Place = TypeVar("_Place")
"""A GPU by its index, or that and the number of its instance."""


class _Known(NamedTuple):
    """A process: its start in clock ticks since boot, whose it is, the job that its environment names, until when."""

    start: int
    identity: Identity
    claimed: str
    until: float


class GpuJobs:
    """The jobs on this node's GPUs by the word of Slurm, kernel and driver in ``gpu_owners``. ``proc`` is procfs."""

    def __init__(
        self, gpu_owners: GpuOwners, *, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gpu_owners, self._proc, self._clock = gpu_owners, proc, clock
        self._known: dict[int, _Known] = {}

    def look(self) -> Mapping[int, frozenset[str]]:
        """The jobs of each GPU by its index: those that it was given to, and those that are on it, if there are any."""
        seen = self._seen()
        given = self._given_files(seen) if self._gpu_owners.instances else self._given(seen)
        found = {gpu: set(jobs) for gpu, jobs in seen.items()}
        for job, gpus in given.items():
            for gpu in gpus:
                found.setdefault(gpu, set()).add(job)
        return {gpu: frozenset(jobs) for gpu, jobs in sorted(found.items()) if jobs}

    def _given_files(self, seen: Mapping[int, frozenset[str]]) -> Mapping[str, frozenset[int]]:
        """The GPUs that Slurm gave each job by its device files; the instances among them are added to ``jobs_on``.

        None of them is believed while a file is not the driver's, or jobs are on others than their own (``_agrees``).
        """
        devices, known = MigDevices(self._proc), self._gpu_owners.instances
        told = {job: [devices.instance(files) for files in several] for job, several in self._gpu_owners.files.items()}
        places = {job: {place for place in several if place is not None} for job, several in told.items()}
        if any(None in several for several in told.values()) or not self._exist({*chain(*places.values())}):
            return {}
        seen_on = self._gpu_owners.jobs_on
        on: dict[tuple[int, int | None], frozenset[str]] = {
            (gpu, None): jobs for gpu, jobs in seen.items() if gpu not in known
        }
        on.update(seen_on.items())
        if not _agrees(places, on):
            return {}
        self._gpu_owners.jobs_on = {
            (gpu, number): seen_on.get((gpu, number), frozenset())
            | {job for job in places if (gpu, number) in places[job]}
            for gpu, instances in known.items()
            for number in instances
        }
        return {job: frozenset(gpu for gpu, _ in several) for job, several in places.items()}

    def _exist(self, places: Collection[tuple[int, int | None]]) -> bool:
        """Whether there are these GPUs without instances, and instances of the others."""
        known, whole = self._gpu_owners.instances, self._gpu_owners.holders.keys() | self._gpu_owners.worked.keys()
        return all(
            gpu in whole - known.keys() if number is None else number in known.get(gpu, ()) for gpu, number in places
        )

    def _given(self, seen: Mapping[int, frozenset[str]]) -> Mapping[str, frozenset[int]]:
        """The GPUs that Slurm gave each job, none if its indexes are not the driver's.

        They are not where ``gres.conf`` lists the devices in another order: then there are more of them than GPUs, or
        jobs are on others than their own (``_agrees``).
        """
        given, known = self._gpu_owners.allocated, self._gpu_owners.holders.keys() | self._gpu_owners.worked.keys()
        return given if all(gpus <= known for gpus in given.values()) and _agrees(given, seen) else {}

    def _seen(self) -> dict[int, frozenset[str]]:
        """The jobs that have processes on each GPU."""
        holders, now = self._gpu_owners.holders, self._clock()
        self._known = {
            pid: known
            for pid in {pid for pids in holders.values() for pid in pids}
            if (known := self._look_up(pid, now)) is not None
        }
        jobs = self._gpu_owners.jobs_of = {pid: job for pid, known in self._known.items() if (job := self._job(known))}
        self._gpu_owners.jobs_on = {
            (gpu, number): frozenset(jobs[pid] for pid in pids if pid in jobs)
            for gpu, instances in self._gpu_owners.instances.items()
            for number, pids in instances.items()
        }
        return {gpu: frozenset(jobs[pid] for pid in pids if pid in jobs) for gpu, pids in holders.items()}

    def _look_up(self, pid: int, now: float) -> _Known | None:
        start = start_time(pid, self._proc)
        known = self._known.get(pid)
        if start is None or (known is not None and known.start == start and now < known.until):
            return known if start is not None else None
        identity = identify(pid, self._proc)
        if identity is None:
            return None
        claimed = "" if identity.job.isdecimal() else _job_in_environment(pid, self._proc)
        return _Known(start, identity, claimed, now + RENEW_S)

    def _job(self, known: _Known) -> str:
        user, job = known.identity
        return self._gpu_owners.number(job) or (known.claimed if self._gpu_owners.confirms(known.claimed, user) else "")


def _agrees(given: Mapping[str, Collection[_Place]], seen: Mapping[_Place, Collection[str]]) -> bool:
    """Whether the GPUs or instances ``given`` to jobs are those that jobs are ``seen`` on, and not in another order.

    Nothing keeps a job's processes off the GPUs of others without ConstrainDevices. A job that uses a GPU of its own
    may use another one too, and no order gives one GPU to two jobs.
    A GPU speaks against the order if a job is on it that is missing on one of its own GPUs, and no job that it was
    given to. The order is Slurm's while more GPUs have their own jobs than speak against it.
    """
    own = {place for place, jobs in seen.items() if any(place in given.get(job, ()) for job in jobs)}
    missing = {job for job, places in given.items() if any(job not in seen.get(place, ()) for place in places)}
    other = [place for place, jobs in seen.items() if place not in own and not missing.isdisjoint(jobs)]
    return not other or len(own) > len(other)


def _job_in_environment(pid: int, proc: Path) -> str:
    """The Slurm job in the environment with which the process began, "" if it has none or may not be read."""
    try:
        with open(proc / str(pid) / "environ", "rb", buffering=0) as file:
            variables = file.read(ENVIRONMENT_BYTES).split(b"\0")
    except OSError:
        return ""
    found = next((entry.removeprefix(_JOB_ID) for entry in variables if entry.startswith(_JOB_ID)), b"")
    return found.decode() if found.isdigit() and found.isascii() else ""


_DEVICE: Final = re.compile(r"nvidia(\d+)")
_CAPABILITY: Final = re.compile(r"nvidia-cap(\d+)")
_ACCESS: Final = re.compile(r"^DeviceFileMinor:\s*(\d+)$", re.MULTILINE)
_MINOR: Final = re.compile(r"^Device Minor:\s*(\d+)\s*$", re.MULTILINE)


class MigDevices:
    """The driver's part of procfs below ``proc``, as it is now."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        driver = proc / "driver/nvidia"
        self._instances = {
            minor: int(path.parent.name.removeprefix("gi"))
            for path in sorted(driver.glob("capabilities/gpu*/mig/gi[0-9]*/access"))
            if (minor := _number(_ACCESS, path)) is not None
        }
        found = [_number(_MINOR, path) for path in sorted(driver.glob("gpus/*/information"))]
        self._gpus = {minor: index for index, minor in enumerate(found) if minor is not None}

    def instance(self, files: Sequence[str]) -> tuple[int, int | None] | None:
        """The GPU, by its place in the order of bus ids, and the number of its GPU instance, None for a whole GPU.

        None if the files are not of one GPU, or of one instance that there is.
        """
        gpus = {int(match[1]) for name in files if (match := _DEVICE.fullmatch(name))}
        capabilities = {int(match[1]) for name in files if (match := _CAPABILITY.fullmatch(name))}
        if len(gpus) != 1 or (gpu := self._gpus.get(gpus.pop())) is None:
            return None
        if not capabilities:
            return gpu, None
        instances = {self._instances[minor] for minor in capabilities if minor in self._instances}
        return (gpu, instances.pop()) if len(instances) == 1 else None


def has_instances(proc: Path = Path("/proc")) -> bool:
    """Whether the driver lists instances of MIG."""
    return any(True for _ in proc.glob("driver/nvidia/capabilities/gpu*/mig/gi[0-9]*/access"))


def _number(pattern: re.Pattern[str], path: Path) -> int | None:
    try:
        match = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return int(match[1]) if match else None
