"""Reading the kernel log: each record once, across restarts of the reader and reboots of the machine.

The format and the errors of reading are those of Documentation/ABI/testing/dev-kmsg in the kernel's source.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Protocol

KERNEL: Final = 0
"""The facility of the kernel's own messages; a process cannot write messages of this facility."""

MESSAGE_CHARS: Final = 1024
"""Longer messages are cut: it bounds the time that matching takes."""

_RECORD_BYTES: Final = 16 << 10
_HEAD_BYTES: Final = 128


class LogRecord(NamedTuple):
    """One record of the log. ``seconds`` are since boot; ``continued``: the text goes on from the record before."""

    facility: int
    sequence: int
    seconds: float
    continued: bool
    text: str


def parse_record(raw: bytes) -> LogRecord:
    """A record as read from /dev/kmsg. Raises ValueError if it is not one.

    The kernel escapes what is not printable. Line breaks are put back, everything else stays escaped.
    """
    head, separator, body = raw.partition(b";")
    fields = head.split(b",")
    if not separator or len(fields) < 4 or len(head) > _HEAD_BYTES:
        raise ValueError("not a record of the kernel log")
    line = body.partition(b"\n")[0][:MESSAGE_CHARS].decode("utf-8", "replace")
    if not line.isprintable():
        line = "".join(char if char.isprintable() else "\ufffd" for char in line)
    continued = fields[3][:1] in (b"c", b"+")
    return LogRecord(int(fields[0]) >> 3, int(fields[1]), int(fields[2]) / 1e6, continued, line.replace("\\x0a", "\n"))


class Device(Protocol):
    """An open kernel log."""

    def read(self) -> bytes:
        """The next record. Raises BlockingIOError if there is none yet, BrokenPipeError if some were overwritten."""
        ...


class KernelLogDevice:
    """``/dev/kmsg``, open at its oldest record. Raises OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self) -> bytes:
        if not (raw := os.read(self._descriptor, _RECORD_BYTES)):
            raise BlockingIOError("nothing more to read")
        return raw


class Position:
    """The sequence number of the last record read, kept in ``file`` with the boot it belongs to.

    ``sequence`` is None if nothing of this boot has been read. ``skip`` makes a first reader of this boot ignore
    existing records. After a reboot they are news. Without any position they are not, because the log may be weeks old.
    ``kept`` is False while the position cannot be written, and ``problem`` says why;
    that is not an error: a full disk must not blind us.
    """

    def __init__(self, file: Path | None, boot_id: str) -> None:
        self._file = file
        self._boot_id = boot_id
        self._written: int | None = None
        self.sequence: int | None = None
        self.skip = True
        self.kept = False
        self.problem = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self._load()

    def _load(self) -> None:
        if self._file is not None:
            state = json.loads(self._file.read_bytes())
            boot_id, sequence = str(state["boot_id"]), int(state["sequence"])
            self.skip = False
            self.sequence = sequence if boot_id == self._boot_id else None

    def advance(self, sequence: int) -> None:
        """Keep ``sequence`` as the last one read."""
        self.sequence = sequence
        if self._file is None or (self.kept and sequence == self._written):
            return
        draft = self._file.with_name(f".{self._file.name}.new")
        try:
            draft.unlink(missing_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
                json.dump({"boot_id": self._boot_id, "sequence": sequence}, file)
            draft.replace(self._file)
        except OSError as error:
            self.kept, self.problem = False, f"{self._file} cannot be written: {error.strerror}"
        else:
            self.kept, self.problem, self._written = True, "", sequence


class KernelLog:
    """The records after ``last`` (None: all). ``overrun`` and ``malformed`` count what was lost."""

    def __init__(self, device: Device, last: int | None) -> None:
        self._device = device
        self.last = last
        self.drained = False
        self.overrun = 0
        self.malformed = 0

    def skip(self) -> None:
        """Pass over everything that is in the log now."""
        while not self.drained:
            for _ in self.read(1000):
                pass
        self.overrun = self.malformed = 0

    def read(self, limit: int) -> Iterator[LogRecord]:
        """Up to ``limit`` records. Afterwards ``drained`` says whether that was all. Raises OSError."""
        self.drained = False
        for _ in range(limit):
            record = self._next()
            if self.drained:
                return
            if record is not None:
                yield record

    def _next(self) -> LogRecord | None:
        """The next record that has not been read before; None if there is none yet or it is lost."""
        try:
            record = parse_record(self._device.read())
            while self.last is not None and record.sequence <= self.last:
                record = parse_record(self._device.read())
        except BlockingIOError:
            self.drained = True
            return None
        except BrokenPipeError:
            return None  # the gap in the sequence will say how many are gone
        except ValueError:
            self.malformed += 1
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.malformed += 1  # longer than any record should be; the kernel has passed over it
            return None
        if self.last is not None:
            self.overrun += record.sequence - self.last - 1
        self.last = record.sequence
        return record
