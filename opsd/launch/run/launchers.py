"""Which launchers a run has and where they listen: from the command line, or from the Slurm job that it runs in."""

from __future__ import annotations

import errno
import hashlib
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_address
from itertools import islice

from opsd.launch.io.addresses import lookup
from opsd.launch.io.protocol import Member
from opsd.slurm.allocation import cloud_addresses
from opsd.slurm.hostlist import HostlistError, expand

DEFAULT_PORT = 29_480
_JOB_PORTS = range(20_000, 32_000)
"""Below the kernel's range of ephemeral ports."""
ASKED_FOR = 4
"""How many other nodes are looked up, one after the other, if the own name is on loopback."""


BATCH = "OPSD_BATCH"
"""Tells the launchers of one ``opsd slurm run`` from those of another one in the same start of the job."""


class RendezvousError(Exception):
    """The launchers of the run cannot be determined; the message says what to pass."""


@dataclass(frozen=True, slots=True)
class NodeCount:
    """How many nodes run ranks."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> NodeCount:
        """``N`` or ``MIN:MAX`` as in torchrun. Raises ValueError."""
        least, _, most = text.partition(":")
        count = cls(int(least), int(most or least))
        if not 1 <= count.least <= count.most:
            raise ValueError(text)
        return count


@dataclass(frozen=True, slots=True)
class Launchers:
    """All launchers of the run, in the order in which they get work, and the own one among them.

    ``borrowed``: the own node is not the Slurm job's, it came from a pool. ``start`` identifies the start of the run
    (see ``start_of``) if the launchers found each other through an endpoint.
    """

    own: Member
    members: tuple[Member, ...]
    borrowed: bool = False
    start: str = ""


def source_address(address: str) -> str:
    """The own address from which ``address`` is reached; sends nothing. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, DEFAULT_PORT))
        return str(probe.getsockname()[0])


def find_launchers(
    nodes: str,
    own_name: str,
    port: int,
    environ: Mapping[str, str],
    source_address: Callable[[str], str] = source_address,
    lookup: Callable[[str], str] = lookup,
) -> Launchers:
    """``nodes`` is a hostlist, optionally with addresses, ``n1=10.0.0.1,n2``; "" means the nodes of the Slurm job.

    Only the own address is looked up, those of others when they are called. Raises RendezvousError.
    """
    given = nodes or slurm_nodes(environ)
    if not given:
        raise RendezvousError(
            "more than one node, and no Slurm job that says which: name them with --nodes n1,n2,…, or give all of them "
            "the same --rdzv-endpoint HOST:PORT"
        )
    told = cloud_addresses(environ)
    members: dict[str, Member] = {}
    for name, address in _pairs(given).items():
        members[name] = Member(name, told.get(address, address), port)
    if own_name not in members:
        shown = ", ".join(list(members)[:8])
        raise RendezvousError(f"this node, {own_name}, is not among the nodes of the run ({shown}); see --node-name")
    listens = _own_address(members, own_name, source_address, lookup)
    members[own_name] = replace(members[own_name], listens=listens)
    job = environ.get("SLURM_JOB_NODELIST", "")
    borrowed = bool(nodes and job) and own_name not in _pairs(job)
    return Launchers(members[own_name], tuple(members.values()), borrowed)


def slurm_nodes(environ: Mapping[str, str]) -> str:
    """The nodes of the step if it has several (``srun -N2`` in a job of six), otherwise those of the job."""
    if environ.get("SLURM_STEP_NUM_NODES", "1") != "1" and environ.get("SLURM_STEP_NODELIST"):
        return environ["SLURM_STEP_NODELIST"]
    return environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""


def too_many_here(environ: Mapping[str, str]) -> str:
    """What to say of a second launcher on this node if Slurm has started several, "" if it has not."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    most = max(map(int, re.findall(r"(?:^|,)(\d+)", tasks)), default=1)
    if most < 2:
        return ""
    return (
        f"; Slurm starts up to {most} tasks on a node here, and one is needed: use srun --ntasks-per-node=1, "
        "and --nproc-per-node for the ranks"
    )


def start_of(run: str, environ: Mapping[str, str], launchers: Launchers, launcher: str) -> str:
    """The identity that the launchers of one start of ``run`` share, and no other copy of the run.

    Slurm may start the job again while a node that was cut off still runs a launcher of the start before. That launcher
    must not join when it is back: it may be told to stop next. A single launcher is a start of its own, and so is a
    step of several nodes, and a group outside Slurm whose first launcher differs.
    """
    if launchers.start:
        return launchers.start
    name, first = start_of_job(run, environ), launchers.members[0]
    if len(launchers.members) == 1:
        return f"{name}, {launcher}"
    if (step := _step(environ)) is not None:
        return f"{name}, step {step}"
    return name if "SLURM_JOB_ID" in environ else f"{name}, {first.name} at {first.address}:{first.port}"


def start_of_job(run: str, environ: Mapping[str, str]) -> str:
    """The start of every launcher in this start of the Slurm job, or its beginning; ``run`` outside Slurm."""
    job, batch = environ.get("SLURM_JOB_ID", ""), environ.get(BATCH, "")
    if not job:
        return run
    name = f"{run}, job {job}.{environ.get('SLURM_RESTART_COUNT') or '0'}"
    return f"{name}, {batch}" if batch else name


def is_single_attempt(environ: Mapping[str, str]) -> bool:
    """Whether no later launchers will have the same start, so that the end of the run is final for it.

    Outside Slurm, and for launchers that a script starts one by one, a later attempt has the same start.
    """
    return "SLURM_JOB_ID" in environ and (BATCH in environ or _step(environ) is not None)


def _step(environ: Mapping[str, str]) -> str | None:
    """The number of the step if it has several nodes."""
    return environ.get("SLURM_STEP_ID") if environ.get("SLURM_STEP_NUM_NODES", "1") != "1" else None


def _pairs(given: str) -> dict[str, str]:
    if "=" not in given:
        try:
            return {name: name for name in expand(given)}
        except HostlistError as error:
            raise RendezvousError(f"the nodes cannot be read: {error}") from error
    pairs = [item.strip().partition("=") for item in given.split(",")]
    return {name: address or name for name, _, address in pairs}


def _own_address(
    members: Mapping[str, Member], own_name: str, source_address: Callable[[str], str], lookup: Callable[[str], str]
) -> str:
    """Where this launcher listens. Debian and cloud-init map the own name to 127.0.1.1, out of reach for the others."""
    own = resolve(members[own_name].address, f"give it as --nodes {own_name}=ADDRESS", lookup)
    if not ip_address(own).is_loopback:
        return own
    others = (member.address for name, member in members.items() if name != own_name)
    unknown: OSError | None = None
    for host in islice(others, ASKED_FOR):
        try:
            if not ip_address(address := lookup(host)).is_loopback:
                return source_address(address)
        except OSError as error:
            unknown = OSError(error.errno, error.strerror, host)
    if unknown is None:
        return own
    raise RendezvousError(
        f"{own_name} is {own} here (/etc/hosts), where no other node can reach it, and {unknown.filename} cannot be "
        f"reached ({unknown.strerror}); give the addresses as --nodes {own_name}=ADDRESS,…"
    ) from unknown


def resolve(host: str, otherwise: str, lookup: Callable[[str], str] = lookup) -> str:
    """The address of ``host``. Raises RendezvousError, which says what to do ``otherwise``."""
    try:
        return lookup(host)
    except OSError as error:
        raise RendezvousError(f"{host} has no address here ({error.strerror}); {otherwise}") from error


def default_port(run: str, environ: Mapping[str, str]) -> int:
    """Where the launchers of ``run`` listen by default: each run of a Slurm job has its own port.

    All launchers compute the same one. Jobs may share nodes, and the runs of one job usually do.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return DEFAULT_PORT
    mark = hashlib.blake2b(f"{job} {run}".encode(), digest_size=8).digest()
    return _JOB_PORTS[int.from_bytes(mark) % len(_JOB_PORTS)]


def cannot_listen(own: Member, error: OSError) -> str:
    """The remedy for the user if ``own`` cannot listen."""
    place = f"cannot listen at {own.host}:{own.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{place}: another program does; give all launchers of the run the same --port, one that is free"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{place}: that is no address of this machine; give the right one as --nodes {own.name}=ADDRESS,…"
    return f"{place}: {error.strerror or error}; choose with --port and --nodes"
