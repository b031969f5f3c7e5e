"""Output streams: held in memory until read, assembled line by line, and written to log files.

If ranks wrote to a log file its disk could fill, and a pipe fills while the launcher is stopped; both would disturb the
user's program. Writes to anonymous memory never fail and never block, and it outlives the launcher.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from opsd.launch.io.reporting import print_message

KEPT = 256 << 20
"""Bytes of a stream kept for a slow reader; older ones are dropped."""
LONGEST = 1 << 20
"""Longer lines are passed on in parts."""
FILES = 3
"""Files per log: NAME, NAME.1 and NAME.2, the newest first."""
RESERVE, RESERVE_SHARE = 64 << 20, 0.05
"""What logs leave free on a disk for the run itself: bytes, or a share if that is less."""
_BREAK = re.compile(rb"\r?\n|\r")
_STEP = 1 << 20
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Spool:
    """One stream. ``descriptor`` is for its writers, who may use it after ``close()``. Raises OSError."""

    def __init__(self, name: str, kept: int = KEPT) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND)
        self._kept = kept
        self._freed = 0
        self._readers: list[Reader] = []
        self._lock = threading.Lock()

    def reader(self) -> Reader:
        """A new reader of the whole stream."""
        reader = Reader(self)
        self._readers.append(reader)
        return reader

    def close(self) -> None:
        """Close the stream once the last reader is done."""
        with self._lock:
            if self.descriptor >= 0 and all(reader.done for reader in self._readers):
                os.close(self.descriptor)
                self.descriptor = -1

    def trim(self) -> None:
        """Free what all have read, and of the rest what exceeds the limit."""
        with self._lock:
            if self.descriptor >= 0:
                self._trim(self._size())

    def read(self, reader: Reader, most: int) -> bytes:
        """Up to ``most`` bytes that ``reader`` has not read yet."""
        with self._lock:
            if self.descriptor < 0:
                return b""
            size = self._size()
            if reader.position < self._freed:
                reader.lost += self._freed - reader.position
                reader.position = self._freed
            data = os.pread(self.descriptor, min(most, size - reader.position), reader.position)
            reader.position += len(data)
            self._trim(size)
            return data

    def peek(self, reader: Reader, last: int) -> bytes:
        """The last ``last`` bytes that ``reader`` has not read yet, which stay unread."""
        with self._lock:
            if self.descriptor < 0:
                return b""
            start = max(reader.position, self._freed, self._size() - last)
            return os.pread(self.descriptor, last, start)

    def _size(self) -> int:
        """Bytes written so far; a program that reopens its output, as ``> /dev/stderr`` does, truncates it."""
        size = os.fstat(self.descriptor).st_size
        if size < max([self._freed, *(reader.position for reader in self._readers)]):
            self._freed = 0
            for reader in self._readers:
                reader.position = 0
        return size

    def _trim(self, size: int) -> None:
        read = min((reader.position for reader in self._readers if not reader.done), default=size)
        # Who is too late loses much at once and not a little again and again.
        free = read if size - read <= self._kept else size - self._kept // 2
        if free - self._freed >= _STEP:
            _libc.fallocate(self.descriptor, _PUNCH_HOLE | _KEEP_SIZE, self._freed, free - self._freed)
            self._freed = free


class Reader:
    """A reader's position in a spool. ``lost``: bytes that were dropped before they were read."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self.position = 0
        self.lost = 0
        self.done = False

    def read(self, most: int) -> bytes:
        """What is new, up to ``most`` bytes."""
        return self._spool.read(self, most)

    def peek(self, last: int) -> bytes:
        """The end of what is new, at most ``last`` bytes, without reading it."""
        return self._spool.peek(self, last)

    def take_lost(self) -> int:
        """Bytes lost since the last call."""
        lost, self.lost = self.lost, 0
        return lost

    def close(self) -> None:
        """Read no more."""
        self.done = True
        self._spool.close()


@dataclass(slots=True, eq=False)
class Stream:
    """A stream that is mixed with others. ``prefix`` precedes each of its lines."""

    prefix: bytes = b""
    pending: bytes = b""


class Mixer:
    """Merges streams by whole lines, and by parts of lines once a stream is quiet.

    A carriage return ends a line as well, so that progress bars move. A change of stream within a line starts a new
    line.
    """

    def __init__(self) -> None:
        self._open: Stream | None = None
        self._returned = False

    def feed(self, stream: Stream, data: bytes) -> bytes:
        """The output to show after ``data`` has come."""
        text = stream.pending + data
        # A carriage return at the end may be half of a line's end.
        whole = max(text.rfind(b"\n"), text.rfind(b"\r", 0, max(0, len(text) - 1))) + 1
        if len(text) - whole > LONGEST:
            whole = len(text)
        stream.pending = text[whole:]
        return self._placed(stream, text[:whole])

    def quiet(self, stream: Stream) -> bytes:
        """The output to show after nothing has come for a while."""
        text, stream.pending = stream.pending, b""
        return self._placed(stream, text)

    def amid_line(self, stream: Stream) -> bool:
        """Whether a part of a long line was passed on, which other streams should not interrupt."""
        return self._open is stream and not self._returned

    def _placed(self, stream: Stream, text: bytes) -> bytes:
        if not text:
            return b""
        goes_on = self.amid_line(stream)
        new_line = b"\n" if self._open not in (None, stream) else b""
        self._open, self._returned = None if text.endswith(b"\n") else stream, text.endswith(b"\r")
        return new_line + (_prefixed(text, stream.prefix, goes_on) if stream.prefix else text)


def _prefixed(text: bytes, prefix: bytes, goes_on: bool) -> bytes:
    """``text`` with ``prefix`` before each line; with ``goes_on`` the first line already has it."""
    end = 2 if text.endswith(b"\r\n") else 1 if text.endswith((b"\n", b"\r")) else 0
    body = text[: len(text) - end]
    simple = b"\r" not in body
    lines = body.replace(b"\n", b"\n" + prefix) if simple else _BREAK.sub(lambda found: found[0] + prefix, body)
    return (b"" if goes_on else prefix) + lines + text[len(text) - end :]


def missing(count: int) -> bytes:
    """The line shown in place of ``count`` lost bytes of output."""
    return b"\n[opsd launch: %d bytes of output are missing here]\n" % count


class LogFile:
    """``path``, rotated every ``limit`` bytes (0: never). Lost output is reported once."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._file = -1
        self._size = 0
        self._missing = 0
        self._said = False
        self._until_look = 0

    def write(self, data: bytes) -> None:
        """Append ``data`` if possible; empty data creates the file."""
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
                print_message(f"output is not written to {self._path}: {error.strerror}; the run goes on")

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
        """Check now and then that the disk has space left; on a file server each check is a request. Raises OSError."""
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
