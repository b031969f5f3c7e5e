"""One generation of the ranks on this node: start them, see them end, leave nothing of them behind."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opsd.launch.failure import RankError
from opsd.launch.process import Child, Exit, send_message, spawn
from opsd.launch.program import Program

WORKER = Path(__file__).with_name("worker.py")
_TAIL_BYTES = 8192


@dataclass(slots=True)
class Rank:
    """A rank of the running generation. ``exited`` is the monotonic second at which its end was noticed."""

    rank: int
    local_rank: int
    child: Child
    log: Path
    error_file: Path
    page: Path
    warm: bool
    exit: Exit | None = None
    exited: float | None = None
    noticed_s: float = 0.0

    def error(self) -> tuple[RankError, float] | None:
        """The exception the rank left in its error file and the wall second of it, None without one."""
        return read_error(self.error_file)

    def log_tail(self, lines: int = 20) -> str:
        """The last ``lines`` lines of the rank's log."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


@dataclass(slots=True)
class Generation:
    """The ranks that were started together; ``number`` counts from 1 over the whole life of the run."""

    number: int
    ranks: list[Rank] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def running(self) -> list[Rank]:
        """The ranks that have not ended yet."""
        return [rank for rank in self.ranks if rank.exit is None]

    @property
    def failed(self) -> list[Rank]:
        """The ranks that have ended other than with exit code 0."""
        return [rank for rank in self.ranks if rank.exit is not None and not rank.exit.ok]


@dataclass(frozen=True, slots=True)
class WarmWorker:
    """A worker process that waits for its orders on ``channel``."""

    child: Child
    channel: socket.socket


def start_worker(program: Program, env: Mapping[str, str], output: int) -> WarmWorker:
    """Start a worker process that waits for its orders. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = (program.python, "-u", str(WORKER), str(theirs.fileno()))
        child = spawn(command, env=env, cwd=program.cwd, output=output, keep=(theirs.fileno(),))
    return WarmWorker(child, ours)


def order_run(worker: WarmWorker, program: Program, env: Mapping[str, str], output: int) -> None:
    """Make a waiting worker the rank. Raises OSError if it is gone."""
    order = {"do": "run", "kind": program.kind, "name": program.name, "args": program.args}
    order |= {"path": program.path, "env": dict(env)}
    with worker.channel:
        send_message(worker.channel, json.dumps(order).encode(), (output,))


def open_log(path: Path) -> int:
    """A descriptor that appends to ``path``, for a rank to write to directly. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def read_error(path: Path) -> tuple[RankError, float] | None:
    """The exception in a rank's error file: ours, or one written by torch's ``@record``; None without one."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        if isinstance(message, str):
            return RankError("Error", message, ""), path.stat().st_mtime
        extra = message["extraInfo"]
        name, _, text = str(message["message"]).partition(": ")
        t = float(extra.get("at") or extra["timestamp"])
        return RankError(str(extra.get("type") or name), text, str(extra.get("where", ""))), t
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
