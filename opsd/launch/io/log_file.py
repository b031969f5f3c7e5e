"""A log file that never grows too large, does not fill its disk, and whose disk may be full."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from opsd.launch.io.reporting import say

FILES = 3
"""How many files a log has at most: NAME, NAME.1 and NAME.2, the newest first."""
RESERVE, RESERVE_SHARE = 64 << 20, 0.05
"""What logs leave free on a disk for what a run cannot go on without: bytes, and a share where that is less."""


def missing(count: int) -> bytes:
    """The line that stands for ``count`` bytes of output that are not there."""
    return b"\n[opsd launch: %d bytes of output are missing here]\n" % count


class LogFile:
    """``path``, begun anew every ``limit`` bytes, 0 for never. What cannot be written is left out, and said once."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._file = -1
        self._size = 0
        self._missing = 0
        self._said = False
        self._until_look = 0

    def write(self, data: bytes) -> None:
        """Append ``data``, where possible; with nothing, make the file."""
        written = 0
        try:
            if self._file < 0:
                self._open()
            if self._limit and self._size and self._size + len(data) > self._limit:
                self._rotate()
            self._leave_room(len(data))
            if self._missing:
                self._append(missing(self._missing))
                self._missing = 0
            while written < len(data):
                written += self._append(data[written:])
        except OSError as error:
            self._missing += len(data) - written
            if not self._said:
                self._said = True
                say(f"output is not written to {self._path}: {error.strerror}; the run goes on")

    def close(self) -> None:
        """Write no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o644)
        self._size = os.fstat(self._file).st_size

    def _append(self, data: bytes) -> int:
        written = os.write(self._file, data)
        self._size += written
        return written

    def _leave_room(self, size: int) -> None:
        """Look now and then how full the disk is; on a file server each look is a question to it. Raises OSError."""
        self._until_look -= size
        if self._until_look < 0:
            disk = os.fstatvfs(self._file)
            reserve = min(RESERVE, int(disk.f_blocks * disk.f_frsize * RESERVE_SHARE))
            free = disk.f_bavail * disk.f_frsize
            if disk.f_blocks and free - size < reserve:
                raise OSError(errno.ENOSPC, "No space left on device that logs may take")
            self._until_look = max(0, free - reserve) // 16

    def _rotate(self) -> None:
        self.close()
        for number in range(FILES - 1, 0, -1):
            newer = self._path if number == 1 else self._older(number - 1)
            with suppress(FileNotFoundError):
                newer.replace(self._older(number))
        self._open()

    def _older(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
