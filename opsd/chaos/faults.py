"""The faults: what each will do, in words for the person who confirms it, how it begins, and how it is undone.

Creating a fault changes nothing. Each function raises ChaosError if its fault cannot be caused here.

Network faults, made with iproute2. Both need root; they do not affect InfiniBand and RoCE.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Final

from opsd.chaos import target
from opsd.chaos.target import Run
from opsd.chaos.undo import (
    QDISC_HANDLE,
    ROUTE_PROTOCOL,
    ChaosError,
    Process,
    Release,
    RemoveQdisc,
    RemoveRoutes,
    RestoreByte,
    Resume,
    Undo,
    change_byte,
    command,
    family,
    root_qdisc,
)
from opsd.checkpoints import manifest
from opsd.rank_page import PageError, RankPage, read_page
from opsd.words import reason

GIB: Final = 1 << 30
ROOT_KEEPS: Final = GIB
"""Bytes that always stay free on the file system of /."""
_POLL_S: Final = 0.001
_STOP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """``begin`` causes it and raises ChaosError or OSError; ``undo`` is None if there is nothing to undo.

    ``held`` are descriptors that the guard has to keep open until the fault is undone.
    """

    name: str
    text: str
    begin: Callable[[], None]
    undo: Undo | None = None
    held: Sequence[int] = ()
    notes: Sequence[str] = ()
    run: str = ""


def kill_rank(run: Run, number: int | None) -> InjectedFault:
    """SIGKILL for one rank."""
    page = target.rank(run, number)
    process = _process(page)

    def begin() -> None:
        if not process.signal(signal.SIGKILL):
            raise ChaosError(f"rank {page.rank} has ended by itself meanwhile")

    return InjectedFault("kill-rank", f"kills {_described(page, run)} (SIGKILL)", begin, run=run.name)


def stop_rank(run: Run, number: int | None) -> InjectedFault:
    """SIGSTOP for one rank, in any phase."""
    page = target.rank(run, number)
    process = _process(page)
    text = f"stops {_described(page, run)} (SIGSTOP)"
    return InjectedFault("stop-rank", text, lambda: _stop(process), Resume(process.pid, process.start), run=run.name)


def hang_collective(run: Run, number: int | None, within_s: float) -> InjectedFault:
    """SIGSTOP for one rank while it is in a collective, so that all others wait for it there."""
    page = target.rank(run, number)
    process = _process(page)

    def begin() -> None:
        path = run.memory / f"rank-{page.rank:04d}.page"
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if _in_collective(path, process):
                _stop(process)
                if _in_collective(path, process):
                    return
                process.signal(signal.SIGCONT)
            time.sleep(_POLL_S)
        raise ChaosError(f"rank {page.rank} was in no collective within {within_s:g} s")

    text = f"stops {_described(page, run)} (SIGSTOP) as soon as it is in a collective, within {within_s:g} s"
    return InjectedFault("hang-collective", text, begin, Resume(process.pid, process.start), run=run.name)


def kill_node(run: Run) -> InjectedFault:
    """SIGKILL for every process of the run on this node. Nothing shuts down cleanly, but the kernel closes sockets."""

    def begin() -> None:
        for _ in range(2):  # the second pass is for processes started during the first
            for process in list(target.everything(run)):
                process.signal(signal.SIGKILL)

    count = sum(1 for _ in target.everything(run))
    notes = ("the node stays up, and its kernel tells the peers that the connections are closed",)
    text = f"kills every process of {run.text} (SIGKILL), {count} at the moment"
    return InjectedFault("kill-node", text, begin, notes=notes, run=run.name)


def reboot_node(node: str, trigger: Path = Path("/proc/sysrq-trigger")) -> InjectedFault:
    """Reboot at once, without writing anything back (kernel documentation, admin-guide/sysrq, command b)."""

    def begin() -> None:
        trigger.write_text("b", encoding="ascii")

    notes = ("nothing is written back to disk, no service is notified, and every job here is lost", "not undone")
    return InjectedFault("kill-node", f"reboots node {node} immediately (sysrq b)", begin, notes=notes)


def corrupt_checkpoint(run: Run, step: int | None, *, forget_memory: bool, leave: bool) -> InjectedFault:
    """One bit of the largest file of a checkpoint on disk, the newest unless ``step`` says otherwise."""
    root = run.folder / "checkpoints"
    known = manifest.steps(root) if root.is_dir() else []
    if not known or step not in (None, *known):
        asked = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        raise ChaosError(f"{asked} in {root}")
    folder = manifest.folder_of(root, known[-1] if step is None else step)
    entry = max(manifest.read(folder).files, key=lambda file: file.size)
    path, offset = folder / entry.name, entry.size // 2
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        was = os.pread(file.fileno(), 1, offset)[0]
    damage = RestoreByte(str(path), offset, was=was, now=was ^ 0x10)

    def begin() -> None:
        if not change_byte(str(path), offset, damage.was, damage.now):
            raise ChaosError(f"{path} has been rewritten meanwhile")
        for kept in run.memory.glob("rank-*.state*") if forget_memory else ():
            kept.unlink(missing_ok=True)

    text = f"flips a bit at byte {offset} of {path}"
    if forget_memory:
        text += " and removes the copies of the checkpoint in memory"
    notes = () if forget_memory else ("a restart reads the copy in memory first, where one is: see --forget-memory",)
    return InjectedFault("corrupt-checkpoint", text, begin, None if leave else damage, notes=notes, run=run.name)


def fill_disk(mount: Path, leave: int) -> InjectedFault:
    """Allocate all but ``leave`` bytes of a file system in an unlinked file, which is freed when it is closed."""
    info = mount.stat()
    if info.st_dev == Path("/").stat().st_dev and leave < ROOT_KEEPS:
        raise ChaosError(f"{mount} is on the file system of /, of which {ROOT_KEEPS >> 20} MB have to stay free")
    size = disk_usage(mount).free - leave
    if size <= 0:
        raise ChaosError(f"only {disk_usage(mount).free >> 20} MB are free on {mount}, less than what has to stay")
    descriptor = _nameless(mount)

    def begin() -> None:
        filled = 0
        try:
            while (more := min(GIB, disk_usage(mount).free - leave)) > 0:
                os.posix_fallocate(descriptor, filled, more)
                filled += more
        finally:
            os.close(descriptor)

    text = f"takes {size >> 20} MB of {mount}, so that {leave >> 20} MB are left"
    return InjectedFault("fill-disk", text, begin, Release(str(mount)), held=(descriptor,))


def _process(page: RankPage) -> Process:
    return Process(page.pid, page.pid_start)


def _described(page: RankPage, run: Run) -> str:
    step = f", step {page.last_step.step}" if page.last_step else ""
    return f"rank {page.rank} of {run.text} (process {page.pid}, phase {page.phase}{step})"


def _stop(process: Process) -> None:
    if not process.signal(signal.SIGSTOP):
        raise ChaosError(f"process {process.pid} has ended by itself meanwhile")
    deadline = time.monotonic() + _STOP_S
    while process.state not in ("T", None):
        if time.monotonic() > deadline:
            raise ChaosError(f"process {process.pid} does not stop: it is in an uninterruptible wait")
        time.sleep(_POLL_S)


def _in_collective(path: Path, process: Process) -> bool:
    try:
        page = read_page(path)
    except PageError as error:
        raise ChaosError(str(error)) from error
    if page.pid != process.pid or not process.alive:
        raise ChaosError(f"rank {page.rank} has been restarted meanwhile")
    return page.phase == "collective"


def _nameless(folder: Path) -> int:
    """An unlinked file in ``folder``. Raises OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError:  # no O_TMPFILE on NFS and some overlays: the name exists for a moment
        path = folder / f".opsd-chaos-{os.getpid()}"
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        return descriptor


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
