"""Network faults, made with iproute2. Both need root; they do not affect InfiniBand and RoCE."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from opsd.chaos.faults import InjectedFault
from opsd.chaos.undo import (
    QDISC_HANDLE,
    ROUTE_PROTOCOL,
    ChaosError,
    RemoveQdisc,
    RemoveRoutes,
    command,
    family,
    root_qdisc,
)
from opsd.words import reason

RATE: Final = re.compile(r"(\d+)([kmg])bit")
DELAY: Final = re.compile(r"\d+(us|ms|s)")
LOSS: Final = re.compile(r"\d{1,2}(\.\d+)?%")
_RDMA: Final = "RDMA traffic (InfiniBand, RoCE) bypasses this and is not affected"
_SSH: Final = b"SSH_CONNECTION="
_BURST_S: Final = 0.01
_MIN_BURST: Final = 16 * 1024


def partition(peers: Sequence[str]) -> InjectedFault:
    """Stop sending to ``peers`` (names or addresses): a blackhole route for each."""
    addresses = sorted({address for peer in peers for address in _addresses(peer)})
    operator = _logged_in_from()
    for address in addresses:
        if address in operator:
            raise ChaosError(f"{address} is the address you are logged in from: you would cut yourself off")
        route = json.loads(command("ip", "-json", family(address), "route", "get", address))[0]
        if route.get("type") == "local":
            raise ChaosError(f"{address} is an address of this node")

    def begin() -> None:
        for address in addresses:
            command("ip", family(address), "route", "add", "blackhole", address, "proto", ROUTE_PROTOCOL)

    text = f"stops sending to {', '.join(addresses)} (a blackhole route for each)"
    notes = (_RDMA, "connections stay open and silent; a new one fails at once", "what they send may still arrive")
    return InjectedFault("partition", text, begin, RemoveRoutes(addresses), notes=notes)


def slow_node(interface: str, *, rate: str, delay: str, loss: str) -> InjectedFault:
    """Shape what an interface sends: a token bucket for a rate alone, netem for the rest."""
    if interface not in {name for _, name in socket.if_nameindex()}:
        raise ChaosError(f"this node has no interface {interface}")
    if root_qdisc(interface).get("handle", "0:") != "0:":
        kind = root_qdisc(interface)["kind"]
        raise ChaosError(f"{interface} has another queueing discipline ({kind}), which would be lost")
    shape = ["netem"]
    shape += ["delay", delay] if delay else []
    shape += ["loss", loss] if loss else []
    shape += ["rate", rate] if rate else []
    if not delay and not loss:
        shape = ["tbf", "rate", rate, "burst", str(_burst(rate)), "latency", "400ms"]

    def begin() -> None:
        command("tc", "qdisc", "add", "dev", interface, "root", "handle", QDISC_HANDLE, *shape)

    text = f"shapes what {interface} sends: {' '.join(shape)}"
    return InjectedFault(
        "slow-node", text, begin, RemoveQdisc(interface), notes=(_RDMA, "what arrives is as fast as before")
    )


def default_interface() -> str:
    """The interface of the default route. Raises ChaosError if there is none."""
    for route in json.loads(command("ip", "-json", "route", "show", "default") or "[]"):
        return str(route["dev"])
    raise ChaosError("this node has no default route: name one with --interface")


def _logged_in_from(proc: str = "/proc") -> set[str]:
    """The addresses in SSH_CONNECTION of this process and its parents, as sudo removes it from the environment."""
    found, pid = set(), os.getpid()
    while pid > 0:
        folder = Path(proc, str(pid))
        with suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            found |= {
                value[len(_SSH) :].split(b" ")[0].decode(errors="replace")
                for value in variables
                if value.startswith(_SSH)
            }
        try:
            pid = int((folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def _addresses(peer: str) -> set[str]:
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(peer, None, proto=socket.IPPROTO_TCP)}
    except OSError as error:
        raise ChaosError(f"{peer} is neither an address nor a known name: {reason(error)}") from None
    if not found or any(ipaddress.ip_address(address).is_multicast for address in found):
        raise ChaosError(f"{peer} is not the address of a node")
    return found


def _burst(rate: str) -> int:
    """Size of the bucket in bytes: the rate times ``_BURST_S``, at least a timer tick (tc-tbf(8))."""
    match = RATE.fullmatch(rate)
    assert match is not None
    bits = int(match[1]) * {"k": 10**3, "m": 10**6, "g": 10**9}[match[2]]
    return max(_MIN_BURST, round(bits / 8 * _BURST_S))
