"""Processes and folders that end with the program that owns them, however it ends.

A watcher of a session of its own holds the reading end of a pipe whose other end only the owner has. The owner
tells it of each process and folder. When the pipe closes, since the owner is done or was killed, the watcher ends the
processes with all in their groups, and removes the folders. The kernel's own signal for this (``PR_SET_PDEATHSIG``)
reaches neither grandchildren nor folders.

The watcher finds what other code has started by a mark in the environment. Descendants inherit it, also those in
sessions of their own.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

ORDERLY_S = 20.0
"""That of most programs: a launcher that stops its ranks in good order takes a few seconds."""
STUCK_S = 10.0
"""How long to wait for processes that were killed: in a call of a file system that hangs one may stay for ever."""
MARKS = "OPSD_ENDS_WITH"
"""The variable with the marks of all programs with which a process ends."""


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
            env={name: value for name, value in os.environ.items() if name != MARKS},
        )
        self._marks_before: str | None = None
        self._marked = False
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def folder(self, path: Path) -> Path:
        """Have ``path`` removed at the end."""
        self._tell(folder=str(path))
        return path

    def temporary(self, prefix: str, where: Path | None = None) -> Path:
        """A new folder below ``where``, by default that for temporary files; it is removed at the end."""
        return self.folder(Path(tempfile.mkdtemp(prefix=prefix, dir=where)))

    def claim_descendants(self) -> None:
        """From now on everything that this process starts ends with it, and what that starts."""
        mark = secrets.token_hex(16)
        self._marks_before, self._marked = os.environ.get(MARKS), True
        os.environ[MARKS] = f"{self._marks_before or ''}:{mark}"
        self._tell(mark=mark)

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
        if self._marked:
            os.environ.pop(MARKS, None)
            os.environ |= {MARKS: self._marks_before} if self._marks_before else {}
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


@contextmanager
def nothing_left(prefix: str) -> Iterator[Dependents]:
    """What the block starts, and its temporary folders, end with it or with the program."""
    before = tempfile.tempdir
    multiprocessing.util.get_temp_dir()  # it is removed at the very end, so it must not lie in the folder of the block
    with Dependents() as mine:
        mine.claim_descendants()
        tempfile.tempdir = str(mine.temporary(prefix))
        try:
            yield mine
        finally:
            tempfile.tempdir = before


def _watch(lines: IO[str], orderly_s: float) -> None:
    """Wait for the end of ``lines``, then end and remove what they have told of."""
    pids, folders, marks = list[int](), list[str](), list[bytes]()
    for line in lines:
        match json.loads(line):
            case {"process": int(pid)}:
                pids.append(pid)
            case {"ended": int(pid)}:
                _signal(pid, signal.SIGKILL)  # what it has left behind in its group
                pids.remove(pid)
            case {"folder": str(folder)}:
                folders.append(folder)
            case {"mark": str(mark)}:
                marks.append(mark.encode())
    marked = {*_marked(marks)}
    first = [pid for pid in marked if _field(pid, 1) not in {str(other) for other in marked}]
    for pid in (*pids, *first):
        _signal(pid, signal.SIGTERM, os.kill)
    deadline = time.monotonic() + orderly_s
    while any(map(_lives, (*pids, *first))) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    deadline = time.monotonic() + STUCK_S
    while (left := [*_marked(marks)]) and time.monotonic() < deadline:  # they may start others meanwhile
        for pid in left:
            _signal(pid, signal.SIGKILL, os.kill)
        time.sleep(0.02)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _marked(marks: Sequence[bytes]) -> Iterator[int]:
    """The living processes with one of ``marks`` in their environment, if they are of the same user."""
    for folder in Path("/proc").glob("[0-9]*") if marks else ():
        with suppress(OSError):
            environment = (folder / "environ").read_bytes()  # that of a zombie is empty
            if any(mark in environment for mark in marks):
                yield int(folder.name)


def _lives(pid: int) -> bool:
    """True until the process ends, also if nobody has taken notice of its end."""
    return _field(pid, 0) not in ("", "Z")


def _field(pid: int, number: int) -> str:
    """A field of the process's status behind its name, "" if it is gone: 0 is its state, 1 its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[number]
    except OSError:
        return ""


def _signal(pid: int, number: int, send: Callable[[int, int], None] = os.killpg) -> None:
    with suppress(ProcessLookupError, PermissionError):
        send(pid, number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _watch(sys.stdin, float(sys.argv[1]))
