"""Which step a program goes on from: that at which the checkpoint was saved that it loads."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

FOLDER = "observed"
KEPT = 16


class SavedSteps:
    """The steps of the newest saves of this rank, kept in the run's ``folder`` for the processes after it.

    Most programs let rank 0 save for all: what a rank has not saved itself is looked up with rank 0. A file is known by
    its path, or, once renamed, by its inode and size. What was saved into memory, as Lightning does before it writes a
    file, is taken for the next file of exactly that size.
    """

    def __init__(self, folder: str | None, rank: int) -> None:
        self._files = [Path(folder, FOLDER, f"rank-{one:04d}.json") for one in (rank, 0)] if folder else []
        self._own: list[list[Any]] | None = None
        self._found: int | None = None
        self._counted = 0

    @property
    def next_step(self) -> int:
        """The number of the first step of this process, from 1: after the newest checkpoint that it has loaded.

        Else after as many as the loaded state of an optimizer has counted.
        """
        return (self._found if self._found is not None else self._counted) + 1

    def note(self, path: str | None, size: int, step: int) -> None:
        """A checkpoint of ``size`` bytes was saved at ``path``, None: into memory, after ``step``."""
        if not self._files:
            return
        own = _read(self._files[0]) if self._own is None else self._own
        mark = (_IN_MEMORY, 0, size, time.time()) if path is None else _mark(path)
        self._own = [*(entry for entry in own if path is None or entry[0] != mark[0]), [*mark, step]][-KEPT:]
        draft = self._files[0].with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            draft.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps(self._own), encoding="utf-8")
            draft.replace(self._files[0])

    def loaded(self, path: str) -> None:
        """This process reads ``path``."""
        path, inode, size, written = _mark(path)
        for file in dict.fromkeys(self._files):
            entries = _read(file)
            steps = [entry[-1] for entry in entries if entry[0] == path or (size and entry[1:3] == [inode, size])]
            buffers = [entry for entry in entries if entry[0] == _IN_MEMORY and size and entry[2] == size]
            if not steps:
                steps = [entry[-1] for entry in buffers if entry[3] <= written + _CLOCKS_S][-1:]
            if steps:
                self._found = max(steps if self._found is None else [*steps, self._found])

    def counted(self, steps: int) -> None:
        """The state of an optimizer that was loaded has seen so many steps."""
        self._counted = max(self._counted, steps)


def _read(file: Path) -> list[list[Any]]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if isinstance(entry, list) and len(entry) == len(_FIELDS)]


_FIELDS = ("path", "inode", "size", "written", "step")
_IN_MEMORY = ""
_CLOCKS_S = 1.0
"""How much the clock of a file server may be behind."""


def _mark(path: str) -> tuple[str, int, int, float]:
    """The absolute path; inode, size and wall second of the last change of a file, 0 of a folder or of nothing."""
    real = Path(path).resolve()
    with contextlib.suppress(OSError):
        info = real.stat()
        if stat.S_ISREG(info.st_mode):
            return str(real), info.st_ino, info.st_size, info.st_mtime
    return str(real), 0, 0, 0.0
