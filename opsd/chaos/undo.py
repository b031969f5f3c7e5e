"""How each lasting fault is undone, as plain data that another process can execute after ``opsd chaos`` has died.

Undoing a fault that is not in effect is no error. Standard library only, as the guard loads this module.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Protocol

from opsd.client import process_start

COMMAND_S: Final = 10.0
QDISC_HANDLE: Final = "c405:"
"""The handle of ``slow-node``'s queueing discipline, which identifies it."""
ROUTE_PROTOCOL: Final = "217"
"""The routing protocol number of the routes of ``partition`` (ip-route(8)): one that no routing daemon has."""


class ChaosError(Exception):
    """A fault that cannot be caused or undone; the message says why in one sentence."""


class Undo(Protocol):
    """The end of a lasting fault. ``kind`` is its name in records; the other fields can be written as JSON."""

    kind: ClassVar[str]

    def undo(self) -> str:
        """End the fault; returns what was done as a sentence. Raises ChaosError and OSError."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, identified also by ``start`` (clock ticks since boot), as pids are reused."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has ``pid`` now, None if there is none."""
        start = process_start(pid)
        return None if start is None else cls(pid, start)

    @property
    def state(self) -> str | None:
        """The kernel's letter for its state (proc(5): R, S, D, T …), None if it has ended."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return None
        return None if int(fields[19]) != self.start or fields[0] in "ZX" else fields[0]

    @property
    def alive(self) -> bool:
        """True while it runs or is stopped."""
        return self.state is not None

    def signal(self, number: signal.Signals) -> bool:
        """Send it a signal; False if it has ended. Raises PermissionError."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue a stopped process."""

    kind: ClassVar[str] = "resume"
    pid: int
    start: int

    def undo(self) -> str:
        """SIGCONT, unless the launcher has killed the process meanwhile."""
        if Process(self.pid, self.start).signal(signal.SIGCONT):
            return f"process {self.pid} goes on"
        return f"process {self.pid} has ended meanwhile"


@dataclass(frozen=True, slots=True)
class RemoveQdisc:
    """Remove the queueing discipline of ``slow-node`` from an interface."""

    kind: ClassVar[str] = "remove_qdisc"
    interface: str

    def undo(self) -> str:
        """Remove it, and no other."""
        if root_qdisc(self.interface).get("handle") != QDISC_HANDLE:
            return f"{self.interface} is no longer slowed"
        command("tc", "qdisc", "del", "dev", self.interface, "root", "handle", QDISC_HANDLE)
        return f"{self.interface} is as fast as before"


@dataclass(frozen=True, slots=True)
class RemoveRoutes:
    """Remove the routes of ``partition``."""

    kind: ClassVar[str] = "remove_routes"
    peers: Sequence[str]

    def undo(self) -> str:
        """Remove those that still exist."""
        for peer in self.peers:
            shown = command("ip", family(peer), "route", "show", peer, "proto", ROUTE_PROTOCOL)
            if shown.strip():
                command("ip", family(peer), "route", "del", "blackhole", peer, "proto", ROUTE_PROTOCOL)
        return f"{', '.join(self.peers)} can be reached again"


@dataclass(frozen=True, slots=True)
class RestoreByte:
    """Restore the byte that was changed in a file."""

    kind: ClassVar[str] = "restore_byte"
    path: str
    offset: int
    was: int
    now: int

    def undo(self) -> str:
        """Write it, unless the file is gone or was changed meanwhile."""
        try:
            restored = change_byte(self.path, self.offset, self.now, self.was)
        except FileNotFoundError:
            return f"{self.path} is gone meanwhile"
        return f"{self.path} is as it was" if restored else f"{self.path} has been rewritten meanwhile"


@dataclass(frozen=True, slots=True)
class Release:
    """The end of ``fill-disk``: its unlinked file is freed when the last process closes it."""

    kind: ClassVar[str] = "release"
    mount: str

    def undo(self) -> str:
        """Nothing to do."""
        return f"the space on {self.mount} is free again"


_KINDS: Final[dict[str, type[Undo]]] = {
    kind.kind: kind for kind in (Resume, RemoveQdisc, RemoveRoutes, RestoreByte, Release)
}


def encode(undo: Undo) -> dict[str, Any]:
    """``undo`` as plain values."""
    return {"kind": undo.kind, **asdict(undo)}  # type: ignore[call-overload]


def decode(value: dict[str, Any]) -> Undo:
    """The inverse of ``encode``. Raises ChaosError if ``value`` is invalid."""
    fields = {name: field for name, field in value.items() if name != "kind"}
    try:
        return _KINDS[value["kind"]](**fields)
    except (KeyError, TypeError) as error:
        raise ChaosError(f"this record was not written by this opsd: {error}") from error


def change_byte(path: str, offset: int, old: int, new: int) -> bool:
    """Replace one byte of a file, durably; False if it is not ``old``. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.pread(descriptor, 1, offset) != bytes([old]):
            return False
        os.pwrite(descriptor, bytes([new]), offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def root_qdisc(interface: str) -> dict[str, Any]:
    """The root queueing discipline of an interface, {} if it has none. Raises ChaosError."""
    found = json.loads(command("tc", "-json", "qdisc", "show", "dev", interface, "root") or "[]")
    return next((qdisc for qdisc in found if qdisc.get("root")), {})


def family(address: str) -> str:
    """The option of ``ip`` for the address's family."""
    return "-6" if ":" in address else "-4"


def command(*argv: str) -> str:
    """What a command of iproute2 prints. Raises ChaosError if it is missing, fails, or takes over ``COMMAND_S``."""
    program = shutil.which(argv[0], path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise ChaosError(f"{argv[0]} is not installed: install the package iproute2")
    try:
        done = subprocess.run(
            [program, *argv[1:]], capture_output=True, text=True, timeout=COMMAND_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise ChaosError(f"{argv[0]} has not ended within {COMMAND_S:g} s") from None
    if done.returncode:
        raise ChaosError(f"{' '.join(argv)}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout
