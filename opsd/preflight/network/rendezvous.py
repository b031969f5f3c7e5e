"""How the nodes of a network check find each other: names, numbers, addresses, interfaces, switches."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from opsd.slurm import topology_source
from opsd.slurm.hostlist import HostlistError, expand
from opsd.slurm.topology import TopologyError

PORT: Final = 29_555


class RendezvousError(Exception):
    """The given nodes or addresses are inconsistent; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Place:
    """This node's position among ``names``; the store is on node 0, at ``host`` and ``port``."""

    names: tuple[str, ...]
    node: int
    host: str
    port: int


def place(hosts: str, node: int | None, rendezvous: str, environment: Mapping[str, str] = os.environ) -> Place:
    """This node's place, from the options, else from Slurm's environment. Raises RendezvousError.

    Without either it is a single node on the loopback interface.
    """
    hostlist = hosts or environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    try:
        names = expand(hostlist) if hostlist else (os.uname().nodename,)
    except HostlistError as error:
        raise RendezvousError(str(error)) from error
    if len({*names}) != len(names):
        raise RendezvousError(f"{hostlist} names a node twice")
    number = int(environment.get("SLURM_NODEID", "0")) if node is None else node
    if not 0 <= number < len(names):
        raise RendezvousError(f"node number {number} is not among the {len(names)} nodes of {hostlist}, 0 is the first")
    first = names[0] if hostlist else "127.0.0.1"
    host, _, port = (rendezvous or first).partition(":")
    if port and not port.isdecimal():
        raise RendezvousError(f"{rendezvous} is no address; write host:port")
    return Place(names, number, host, int(port or port_of(int(environment.get("SLURM_JOB_ID", "0")))))


def resolve(here: Place) -> None:
    """Raise RendezvousError if the host of the store has no address here: torch would ask for it again and again."""
    try:
        socket.getaddrinfo(here.host, here.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RendezvousError(
            f"{here.host}, where the nodes meet, has no address here ({why}); name another with --rendezvous HOST"
        ) from error


def port_of(job: int) -> int:
    """Where the nodes of this job meet: jobs on the same node must not meet each other's stores."""
    return PORT + job % 1000


def interface_towards(host: str) -> str:
    """Name of the interface through which ``host`` is reached, "" if unknown."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            mine = probe.getsockname()[0]
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == mine for entry in addresses):
            return name
    return ""


def use_interface(host: str) -> None:
    """Make gloo and NCCL's bootstrap use the interface towards ``host``, unless the environment sets one."""
    if name := interface_towards(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def read_switches(path: Path | None, say: Callable[[str], None] = lambda _: None) -> Mapping[str, str]:
    """Node to leaf switch from the file ``path``, or as this cluster's topology has it; see ``topology_source.read``.

    Raises RendezvousError if a file cannot be read.
    """
    try:
        return topology_source.read(path, say=say).leaf
    except TopologyError as error:
        raise RendezvousError(str(error)) from error
