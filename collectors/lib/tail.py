"""Following files that somebody else writes, possibly a user while the reader is root.

Nothing here follows a symbolic link, blocks on a pipe, enters what is mounted over a file, or reads without a bound.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from opsd.collectors.lib.rights import READ, Rights
from opsd.inodes import open_beside

MAX_LINE: Final = 128 << 10
"""Longer lines are skipped."""
CHUNK: Final = 256 << 10
"""Most that is read from one file at a time; the rest waits for the next call."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK


class LineCutter:
    """Puts lines together from chunks that were cut anywhere."""

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max = max_line
        self._rest = b""
        self._skipping = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines completed by ``chunk``, without their line ends. Empty lines and those too long are left out."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if lines and self._skipping:
            self._skipping = False
            del lines[0]
        if len(self._rest) > self._max:
            self._skipping, self._rest = True, b""
        elif self._skipping:
            self._rest = b""
        return [line for line in lines if 0 < len(line) <= self._max]


class Tail:
    """The lines appended to a file, each exactly once; a file that was replaced is read from its start.

    A file is read only if the user of ``rights`` could read it: a name may be a hard link to another's file.
    """

    def __init__(self, name: str, rights: Rights) -> None:
        self._name = name
        self._rights = rights
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._cutter = LineCutter()

    def skip(self, folder: int) -> None:
        """Pass over what the file holds already. ``folder`` is open."""
        try:
            descriptor = open_beside(self._name, folder, os.O_PATH)
        except OSError:
            return
        info = os.fstat(descriptor)
        os.close(descriptor)
        self._file, self._offset, self._cutter = (info.st_dev, info.st_ino), info.st_size, LineCutter()

    def read(self, folder: int, limit: int = CHUNK) -> list[bytes]:
        """The complete lines added since the last call; none if there is no such regular file. ``folder`` is open.

        At most ``limit`` bytes are read, and never more than ``CHUNK``.
        """
        if limit <= 0:
            return []
        try:
            descriptor = open_beside(self._name, folder, _FLAGS)
        except OSError:
            return []
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode) or not self._rights.allow(descriptor, READ):
                return []
            if self._file != (info.st_dev, info.st_ino) or info.st_size < self._offset:
                self._file, self._offset, self._cutter = (info.st_dev, info.st_ino), 0, LineCutter()
            chunk = os.pread(descriptor, min(limit, CHUNK), self._offset)
        except OSError:
            return []
        finally:
            os.close(descriptor)
        self._offset += len(chunk)
        return self._cutter.feed(chunk)


def read_small(name: str, folder: int, rights: Rights, limit: int = CHUNK) -> tuple[bytes, float] | None:
    """Content and modification time of a regular file of at most ``limit`` bytes, None if there is none.

    Also None if the user of ``rights`` could not read it.
    """
    try:
        descriptor = open_beside(name, folder, _FLAGS)
    except OSError:
        return None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
            return None
        if not rights.allow(descriptor, READ):
            return None
        return os.pread(descriptor, limit, 0), info.st_mtime
    except OSError:
        return None
    finally:
        os.close(descriptor)
