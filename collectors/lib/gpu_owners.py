"""The owners of this node's GPUs by the driver and Slurm. Claims of rank pages are compared with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from opsd.collectors.lib.processes import Identity, identify, user_of

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
