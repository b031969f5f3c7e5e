"""Processes and folders that end with the program that owns them, however it ends.

A watcher of a session of its own holds the reading end of a pipe whose other end only the owner has. It is told of
each process and folder. When the pipe closes, since the owner is done or was killed, the watcher ends the processes,
with all in their groups, and removes the folders. The kernel's own signal for this (``PR_SET_PDEATHSIG``) reaches
neither grandchildren nor folders.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

ORDERLY_S = 20.0
"""That of most programs: a launcher that stops its ranks in good order takes a few seconds."""


class Dependents:
    """The processes and folders of this program. Used in one thread; they end with ``close`` or with the program.

    A process has ``orderly_s`` seconds to end by itself after SIGTERM.
    """

    def __init__(self, orderly_s: float = ORDERLY_S) -> None:
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(orderly_s)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def folder(self, path: Path) -> Path:
        """Have ``path`` removed at the end."""
        self._tell(folder=str(path))
        return path

    def start(
        self, command: Sequence[str], output: IO[bytes], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` with its output in a file, as the leader of a process group. Raises OSError."""
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
            process_group=0,
        )  # fmt: skip
        self._processes.append(process)
        self._tell(process=process.pid)
        return process

    def close(self) -> None:
        """End all processes and remove the folders; returns once that is done."""
        assert self._watcher.stdin is not None
        for process in self._processes:
            if process.poll() is not None:
                self._tell(ended=process.pid)
        self._watcher.stdin.close()
        while self._watcher.poll() is None:
            for process in self._processes:
                process.poll()  # reaps it, so that the watcher sees its end
            time.sleep(0.02)
        for process in self._processes:
            process.wait()

    def _tell(self, **what: object) -> None:
        assert self._watcher.stdin is not None
        print(json.dumps(what), file=self._watcher.stdin, flush=True)


def _watch(lines: IO[str], orderly_s: float) -> None:
    """Wait for the end of ``lines``, then end and remove what they have told of."""
    pids, folders = list[int](), list[str]()
    for line in lines:
        match json.loads(line):
            case {"process": int(pid)}:
                pids.append(pid)
            case {"ended": int(pid)}:
                _signal(pid, signal.SIGKILL)  # what it has left behind in its group
                pids.remove(pid)
            case {"folder": str(folder)}:
                folders.append(folder)
    for pid in pids:
        _signal(pid, signal.SIGTERM, os.kill)
    deadline = time.monotonic() + orderly_s
    while any(map(_leads, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _leads(pid: int) -> bool:
    """True while the leader of the group lives."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _signal(pid: int, number: int, send: Callable[[int, int], None] = os.killpg) -> None:
    with suppress(ProcessLookupError, PermissionError):
        send(pid, number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _watch(sys.stdin, float(sys.argv[1]))
