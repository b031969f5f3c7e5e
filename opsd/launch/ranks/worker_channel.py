"""The launcher's side of the talk with ``worker.py``."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opsd.launch.ranks.process import GONE_S, Child, spawn
from opsd.launch.ranks.program import Program

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process that waits for its orders on ``channel``, in the environment ``env``."""

    child: Child
    channel: socket.socket
    env: Mapping[str, str]

    def discard(self) -> None:
        """Kill the worker and collect it, unless the kernel holds it."""
        self.kill()
        self.child.reap(GONE_S)

    def kill(self) -> None:
        """Kill the worker; it is still to be collected."""
        self.channel.close()
        self.child.kill_group()


def start_worker(program: Program, env: Mapping[str, str], output: int, error_output: int) -> Worker:
    """Start a worker process that waits for its orders. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = (program.python, "-u", str(WORKER), str(theirs.fileno()), *program.words)
        child = spawn(
            command, env=env, cwd=program.cwd, output=output, error_output=error_output, keep=(theirs.fileno(),),
            stdin=None,
        )  # fmt: skip
    return Worker(child, ours, env)


def order_import(worker: Worker, program: Program, extra: Sequence[str], watch: Collection[str]) -> None:
    """Make a waiting worker import what the program will, and ``extra``. Raises OSError if it is gone.

    It answers with one line once it has, saying which of the variables ``watch`` the imports have read.
    """
    _send(worker.channel, {"do": "import", **_described(program), "extra": list(extra), "watch": sorted(watch)})


def order_run(worker: Worker, program: Program, env: Mapping[str, str], outputs: tuple[int, int]) -> None:
    """Make a waiting worker the rank, with ``outputs`` as its stdout and stderr. Raises OSError if it is gone.

    The channel becomes readable when the program has failed, and at the latest when it has ended.
    """
    order = {"do": "run", **_described(program), "changes": changes(worker.env, env)}
    _send(worker.channel, order, outputs)


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that differ, with their new values, None for those that are gone."""
    return {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def _described(program: Program) -> dict[str, object]:
    argv0 = program.given if program.kind == "script" and program.given else program.name
    return {"kind": program.kind, "name": program.name, "argv0": argv0, "args": program.args, "path": program.path}


def open_log(path: Path) -> int:
    """A descriptor that appends to ``path``, for a process to write to directly. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def _send(channel: socket.socket, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> None:
    payload = json.dumps(message).encode()
    socket.send_fds(channel, [len(payload).to_bytes(4, "little")], list(descriptors))
    channel.sendall(payload)
