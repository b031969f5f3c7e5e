"""What a process prints, held in memory until it has been read: writing there never fails and never waits.

A log file fills its disk and a pipe fills up while the launcher is stopped, and either is an error or a standstill in
the user's program. Anonymous memory is neither limited by a file system nor gone when the launcher is.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading

KEPT = 256 << 20
"""Bytes of a stream that wait for a reader that is late or stands still; older ones are given up."""
_STEP = 1 << 20
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Spool:
    """One stream. ``descriptor`` is for its writers, who may go on with it after ``close()``. Raises OSError."""

    def __init__(self, name: str, kept: int = KEPT) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND)
        self._kept = kept
        self._freed = 0
        self._readers: list[Reader] = []
        self._lock = threading.Lock()

    def reader(self) -> Reader:
        """Somebody who reads all of it, at a pace of its own."""
        reader = Reader(self)
        self._readers.append(reader)
        return reader

    def close(self) -> None:
        """Read no more, once the last reader is done."""
        with self._lock:
            if self.descriptor >= 0 and all(reader.done for reader in self._readers):
                os.close(self.descriptor)
                self.descriptor = -1

    def trim(self) -> None:
        """Give back what all have read, and of the rest what is too much."""
        with self._lock:
            if self.descriptor >= 0:
                self._trim(self._size())

    def read(self, reader: Reader, most: int) -> bytes:
        """What ``reader`` has not read yet, up to ``most`` bytes."""
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
        """The last ``last`` bytes of what ``reader`` has not read yet, which stays unread."""
        with self._lock:
            if self.descriptor < 0:
                return b""
            start = max(reader.position, self._freed, self._size() - last)
            return os.pread(self.descriptor, last, start)

    def _size(self) -> int:
        """Bytes written so far; a program that opens its output anew, as ``> /dev/stderr`` does, begins anew."""
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
    """Where somebody is in a spool. ``lost``: bytes that were given up before they were read."""

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
