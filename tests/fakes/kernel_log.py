"""A kernel log in memory that behaves like /dev/kmsg: one record a read, a ring that overwrites what was not read."""

from __future__ import annotations

import errno
from pathlib import Path


class RingLog:
    """The log of one boot. ``size`` records fit into it. Each call opens it again at its oldest record."""

    def __init__(self, size: int = 1_000_000) -> None:
        self._size = size
        self._first = 0
        self._records: list[bytes] = []

    def write(self, text: str, *, seconds: float = 0.0, facility: int = 0, flag: str = "-") -> None:
        """Append a record."""
        sequence = self._first + len(self._records)
        self.write_raw(f"{facility << 3 | 6},{sequence},{int(seconds * 1e6)},{flag};{text}\n".encode())

    def write_raw(self, record: bytes) -> None:
        """Append these bytes as one record."""
        self._records.append(record)
        if len(self._records) > self._size:
            del self._records[0]
            self._first += 1

    def __call__(self, path: Path) -> Reader:
        return Reader(self)

    def at(self, sequence: int) -> bytes | None:
        """The record with this number; raises BrokenPipeError if it was overwritten; None if it is not written yet."""
        if sequence < self._first:
            raise BrokenPipeError(errno.EPIPE, "overwritten")
        index = sequence - self._first
        return self._records[index] if index < len(self._records) else None

    @property
    def first(self) -> int:
        """The number of the oldest record."""
        return self._first


class Reader:
    """One open file of a RingLog."""

    def __init__(self, log: RingLog) -> None:
        self._log = log
        self._next = log.first
        self.reads = 0

    def read(self) -> bytes:
        self.reads += 1
        try:
            record = self._log.at(self._next)
        except BrokenPipeError:
            self._next = self._log.first
            raise
        if record is None:
            raise BlockingIOError(errno.EAGAIN, "nothing new")
        self._next += 1
        return record
