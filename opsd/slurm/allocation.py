"""What the environment of a task or of a batch script says of the Slurm job that it belongs to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opsd.slurm.hostlist import HostlistError, expand


class AllocationError(ValueError):
    """The environment is not that of a Slurm job, or not a whole one; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job as it was when the task began; environments of running tasks never change.

    ``nodes`` are in Slurm's order, ``node`` is the own one ("" outside of the cluster's nodes).
    """

    job: int
    nodes: tuple[str, ...]
    node: str
    restarts: int
    partition: str
    account: str

    @property
    def same_queue(self) -> tuple[str, ...]:
        """The options of sbatch with which another job has the partition and the account of this one."""
        told = {"partition": self.partition, "account": self.account}
        return tuple(f"--{name}={value}" for name, value in told.items() if value)


def in_job(environ: Mapping[str, str]) -> bool:
    """True inside of a Slurm job."""
    return "SLURM_JOB_ID" in environ


def allocation(environ: Mapping[str, str]) -> Allocation:
    """The job that ``environ`` tells of. Raises AllocationError."""
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
    )


def cloud_addresses(environ: Mapping[str, str]) -> dict[str, str]:
    """The addresses of the nodes whose names nobody resolves, from SLURM_NODE_ALIASES (until Slurm 23.02).

    It reads ``name:address:host name,…``; IPv6 addresses are in brackets (sbatch(1)).
    """
    found = {}
    for alias in filter(None, environ.get("SLURM_NODE_ALIASES", "").split(",")):
        name, _, rest = alias.partition(":")
        address = rest[1:].partition("]")[0] if rest.startswith("[") else rest.partition(":")[0]
        if address:
            found[name] = address
    return found


def _number(environ: Mapping[str, str], name: str) -> int:
    """The number in a variable, 0 where it is missing. Raises AllocationError."""
    text = environ.get(name, "0")
    if not text.isdecimal():
        raise AllocationError(f"{name} is {text!r} where a number should be")
    return int(text)
