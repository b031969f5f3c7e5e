"""The Slurm job that a process belongs to, from its environment variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opsd.slurm.hostlist import HostlistError, expand


class AllocationError(ValueError):
    """The environment is not that of a Slurm job, or is incomplete; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job as it was when the task started; the environment of a running task does not change.

    ``nodes`` are in Slurm's order. ``node`` is this process's node, "" outside the cluster.
    """

    job: int
    nodes: tuple[str, ...]
    node: str
    restarts: int
    partition: str
    account: str
    qos: str = ""

    @property
    def same_queue(self) -> tuple[str, ...]:
        """The sbatch options that give another job the same partition and account."""
        told = {"partition": self.partition, "account": self.account}
        return tuple(f"--{name}={value}" for name, value in told.items() if value)


def in_job(environ: Mapping[str, str]) -> bool:
    """Whether this is inside a Slurm job."""
    return "SLURM_JOB_ID" in environ


def allocation(environ: Mapping[str, str]) -> Allocation:
    """The job described by ``environ``. Raises AllocationError."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        raise AllocationError("this is not inside a Slurm job: there is no SLURM_JOB_ID; use sbatch or srun")
    hostlist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    try:
        nodes = expand(hostlist)
    except HostlistError as error:
        raise AllocationError(f"SLURM_JOB_NODELIST cannot be read: {error}") from error
    if not nodes:
        raise AllocationError(f"the environment of job {job} has no SLURM_JOB_NODELIST; start this with srun or sbatch")
    return Allocation(
        job=int(job),
        nodes=nodes,
        node=environ.get("SLURMD_NODENAME", ""),
        restarts=_number(environ, "SLURM_RESTART_COUNT"),
        partition=environ.get("SLURM_JOB_PARTITION", ""),
        account=environ.get("SLURM_JOB_ACCOUNT", ""),
        qos=environ.get("SLURM_JOB_QOS", ""),
    )


def segment_of(environ: Mapping[str, str]) -> int | None:
    """The nodes of a segment that ``sbatch --segment`` asked for, None without."""
    text = environ.get("SLURM_JOB_SEGMENT_SIZE", "")
    return int(text) or None if text.isdecimal() else None


def cloud_addresses(environ: Mapping[str, str]) -> dict[str, str]:
    """The addresses of nodes whose names do not resolve, from SLURM_NODE_ALIASES (until Slurm 23.02).

    Its form is ``name:address:host name,…``, with IPv6 addresses in brackets (sbatch(1)).
    """
    found = {}
    for alias in filter(None, environ.get("SLURM_NODE_ALIASES", "").split(",")):
        name, _, rest = alias.partition(":")
        address = rest[1:].partition("]")[0] if rest.startswith("[") else rest.partition(":")[0]
        if address:
            found[name] = address
    return found


def _number(environ: Mapping[str, str], name: str) -> int:
    """The number in a variable, 0 if it is unset. Raises AllocationError."""
    text = environ.get(name, "0")
    if not text.isdecimal():
        raise AllocationError(f"{name} is {text!r} where a number should be")
    return int(text)
