"""Growing files of JSON lines: lines are appended whole, and read from the position up to which they were."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from opsd.durable import is_named
from opsd.threads import Work, run_now
from opsd.words import remedy

METRICS = "metrics.jsonl"
"""The file of the steps in a run's folder."""
Line = dict[str, Any]
Positions = dict[str, int]
"""Bytes read, by file name."""


class Appender:
    """Appends lines to a file. A full disk does not stop the training: lines are dropped, with one message.

    If another program moves or removes the file, the next line goes to a new one.
    """

    def __init__(self, path: Path, background: Callable[[Work], None] = run_now) -> None:
        """``background`` runs work that may have to wait for storage."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = self._open()
        self._told = False
        self._background = background

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, line: Line) -> None:
        """Append ``line``, whose numbers are finite."""
        self._background(partial(self._append, json.dumps(line).encode() + b"\n"))

    def _append(self, line: bytes) -> None:
        """Append a whole line, or nothing."""
        try:
            if not is_named(self._path, self._file):
                opened = self._open()
                os.dup2(opened, self._file, inheritable=False)
                os.close(opened)
            end = os.lseek(self._file, 0, os.SEEK_END)
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._told:
                why = f"{error.strerror}; lines are missing until it can{remedy(error)}"
                print(f"opsd: {self._path} cannot be written: {why}", file=sys.stderr)
            self._told = True


def new_lines(path: Path, positions: Positions) -> Iterator[Line]:
    """The complete lines of ``path`` after its position, which advances with each.

    Lines that are not JSON objects are skipped: two writers on a network file system, a full disk or a power loss can
    leave them. A file that cannot be read has no lines; one that has shrunk is read from its beginning.
    """
    with suppress(OSError), open(path, "rb") as file:
        at = positions.get(path.name, 0)
        positions[path.name] = at if at <= os.fstat(file.fileno()).st_size else 0
        file.seek(positions[path.name])
        for content in file:
            if not content.endswith(b"\n"):  # being written
                return
            positions[path.name] += len(content)
            with suppress(ValueError):
                line = json.loads(content)
                if isinstance(line, dict):
                    yield line


def read_positions(path: Path) -> Positions:
    """The positions stored by an earlier start; empty without any."""
    with suppress(OSError, ValueError):
        positions: Positions = json.loads(path.read_text(encoding="utf-8"))
        return positions
    return {}


def write_positions(path: Path, positions: Positions) -> None:
    """Store the positions. If the disk is full, the next start reads the lines again."""
    with suppress(OSError):
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(positions), encoding="utf-8")
        draft.replace(path)
