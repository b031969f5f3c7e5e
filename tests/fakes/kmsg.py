"""A kernel log in memory, and a machine that has it.

A kernel log in memory that behaves like /dev/kmsg: one record a read, a ring that overwrites what was not read.
"""

from __future__ import annotations

import errno
from pathlib import Path

from opsd.collectors.base import Reading
from opsd.collectors.kmsg import KmsgCollector
from opsd.collectors.lib.kernel.xid import XidLedger
from tests.fakes.clock import FakeClock


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


# A machine with a kernel log, and the collector that reads it.


GPU = "00000000:3B:00.0"
XID_31 = "NVRM: Xid (PCI:0000:3b:00): 31, pid=89, name=python, Ch 00000018, MMU Fault"
XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FALLEN = "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."


class Node:
    """A machine with a kernel log, on which the agent is started, stopped and restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = RingLog()
        self.clock = FakeClock(now=1000.0, wall=50_000.0)
        self.state = folder / "kmsg.json"
        self.ledger = XidLedger()
        self._boots = 0
        self.boot()

    def boot(self) -> None:
        """A new boot: another boot id, an empty log."""
        self._boots += 1
        self.log = RingLog()
        file = self.folder / "proc/sys/kernel/random/boot_id"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"boot-{self._boots}\n")

    def device(self, kind: str, address: str) -> None:
        """Let the driver show a device in /proc."""
        (self.folder / "proc/driver" / kind / address).mkdir(parents=True)

    def say(self, text: str, **how: object) -> None:
        """The kernel logs ``text`` now."""
        self.log.write(text, **{"seconds": self.clock.now, **how})  # type: ignore[arg-type]

    def agent(self, **arguments: object) -> KmsgCollector:
        """A freshly started collector."""
        given = {"open_device": self.log, "clock": self.clock.monotonic, "wall": self.clock.wall, "ledger": self.ledger}
        return KmsgCollector(self.state, proc=self.folder / "proc", **{**given, **arguments})  # type: ignore[arg-type]


def read(collector: KmsgCollector) -> Reading:
    """One collection, which must not be an absence."""
    reading = collector.collect()
    assert isinstance(reading, Reading)
    return reading


def codes(reading: Reading) -> list[object]:
    """The Xids among the events."""
    return [event.data["code"] for event in reading.events if event.kind == "xid"]


def values(reading: Reading, metric: str) -> dict[tuple[str, ...], float]:
    """The series of one metric."""
    return {sample.labels: sample.value for sample in reading.samples if sample.metric.name == metric}
