"""The kernel log: Xids, the out-of-memory killer, machine checks, failing disks, links and file systems.

Each message is reported once. The position in the log is kept in a file, so a restarted agent neither repeats nor
misses messages. Messages that processes write into the log do not count.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import Field

from opsd.collectors.base import Context, Event, Metric, NoData, Plugin, Reading, Sample
from opsd.collectors.lib.clock import boot_id
from opsd.collectors.lib.gpu_owners import GpuOwners
from opsd.collectors.lib.kernel.messages import (
    KERNEL,
    KINDS,
    MESSAGE_CHARS,
    Device,
    KernelLog,
    KernelLogDevice,
    LogRecord,
    Position,
    Trouble,
    by_firewall,
    parse_oom_victim,
    parse_trouble,
)
from opsd.collectors.lib.kernel.xid import LABELS as XID_LABELS
from opsd.collectors.lib.kernel.xid import TOTAL, Sxid, Xid, XidLedger, parse_sxid, parse_xid, xid_event
from opsd.collectors.lib.pci import ADDRESS, bus_id
from opsd.collectors.lib.processes import job_of_group
from opsd.settings.sections import CollectorSettings

SXIDS = Metric("opsd_sxid_total", "SXid errors of the NVSwitch.", "counter", labels=("pci_bus_id", "severity"))
EVENTS = Metric(
    "opsd_kernel_events_total", "Kernel messages that tell of trouble.", "counter", labels=("kind",), kept=False
)
RECORDS = Metric("opsd_kmsg_records_total", "Records read from the kernel log.", "counter")
DROPPED = Metric(
    "opsd_kmsg_dropped_total",
    "Kernel messages lost: overwritten before they were read (overrun), not a record (malformed), "
    "or too many different events at once (crowded; they are counted nevertheless).",
    "counter",
    labels=("reason",),
)
KEPT = Metric("opsd_kmsg_position_kept", "1 if the position in the kernel log survives a restart of the agent.")

LABELS: Final = {
    "pci_bus_id": "16 NVSwitches at most; 32 GPUs with Xids at most, and other",
    "severity": "severities of SXids",
    "kind": "kinds of kernel messages",
    "reason": "3 for lost kernel messages",
}

SEVERITIES: Final = ("fatal", "non_fatal", "correctable", "unknown")
_IDENTITY: Final = (
    "device",
    "pid",
    "server",
    "pci_bus_id",
    "location",
    "severity",
    "cause",
    "outcome",
    "lockup",
    "record",
)
_MAX_VICTIMS: Final = 64
_BY_FIRMWARE: Final = {
    "corrected": "Corrected", "recoverable": "Uncorrected (Non-Fatal)", "fatal": "Uncorrected (Fatal)",
}  # fmt: skip
"""How severe a PCIe error is that the firmware reports: its word and that of AER."""

_MAX_SWITCHES: Final = 16
_MAX_MESSAGE: Final = 256
"""Characters of a line that an event keeps."""

Finding = Xid | Sxid | Trouble


@dataclass(slots=True)
class _Found:
    """Equal messages of one collection taken together. ``seconds`` (since boot) and ``text`` are of the first."""

    what: Finding
    text: str
    seconds: float
    count: int = 1


def parse_message(text: str) -> Finding | None:
    """The event of a message, or None if it is irrelevant."""
    return None if by_firewall(text) else parse_xid(text) or parse_sxid(text) or parse_trouble(text)


def _identity(what: Finding) -> Hashable:
    if isinstance(what, Trouble):
        return (what.kind, *(what.data.get(name) for name in _IDENTITY))
    if isinstance(what, Xid):
        return ("xid", what.code, what.pci_bus_id, what.pid)
    return ("sxid", what.code, what.pci_bus_id, what.link)


class KmsgSettings(CollectorSettings):
    """The kernel's log, followed for Xids and other trouble. Needs root."""

    ignored_xids: tuple[int, ...] = Field(
        default=(),
        strict=False,
        examples=[(94,)],
        description="Xids that open no incident on this site, whatever source reports them; they are counted.",
    )


class KmsgCollector:
    """Trouble that the kernel logs.

    ``state`` is the file that keeps the position; with None, what is in the log at the start is passed over. ``ledger``
    is shared with other sources of Xids. ``injected`` also takes what processes write into the log, to try things out.
    At most ``max_records`` are read and ``max_events`` returned at a time. ``clock`` is in seconds since boot, as
    time.monotonic on Linux, ``wall`` since the epoch. ``gpu_owners`` tells whose process an Xid names.
    """

    name = "kmsg"
    metrics = (TOTAL, SXIDS, EVENTS, RECORDS, DROPPED, KEPT)

    def __init__(
        self,
        state: Path | None = None,
        *,
        path: Path = Path("/dev/kmsg"),
        proc: Path = Path("/proc"),
        ledger: XidLedger | None = None,
        injected: bool = False,
        open_device: Callable[[Path], Device] = KernelLogDevice,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        max_records: int = 10_000,
        max_events: int = 200,
        gpu_owners: GpuOwners | None = None,
    ) -> None:
        self._state, self._gpu_owners = state, gpu_owners or GpuOwners()
        self._path = path
        self._proc = proc
        self._ledger = ledger or XidLedger()
        self._injected = injected
        self._open_device = open_device
        self._clock = clock
        self._wall = wall
        self._max_records = max_records
        self._max_events = max_events
        self._opened: tuple[KernelLog, Position] | None = None
        self._drained_at = 0.0
        self._unfinished = ""
        self._victims: dict[int, str] = {}
        self._record: tuple[object, str] = None, ""
        self._records = 0
        self._crowded = 0
        self._events = Counter(dict.fromkeys(KINDS, 0))
        self._sxids: dict[str, Counter[str]] = {}

    def collect(self) -> Reading | NoData:
        """Read what is new in the log. Raises OSError if the log is there and cannot be read."""
        result: Reading | NoData | None = None
        try:
            result = self._read()
            return result
        finally:
            self._ledger.kernel_log = isinstance(result, Reading)

    def _read(self) -> Reading | NoData:
        try:
            log, position = self._opened = self._opened or self._open()
        except FileNotFoundError as error:
            return NoData(f"no kernel log: {error.filename} does not exist, as is usual in a container")
        except PermissionError:
            return NoData(f"{self._path} may not be read; run the agent as root or with CAP_SYSLOG")
        now, wall = self._clock(), self._wall()
        found = self._find(log.read(self._max_records), now, wall)
        if log.drained:
            self._drained_at = now
        if log.last is not None:
            position.advance(log.last)
        events = tuple(self._event(entry, wall - now + entry.seconds) for entry in found)
        return Reading(tuple(self._samples(log, position)), events, limited=position.problem)

    def _open(self) -> tuple[KernelLog, Position]:
        position = Position(self._state, boot_id(self._proc))
        log = KernelLog(self._open_device(self._path), position.sequence)
        if position.skip:
            log.skip()
            self._drained_at = self._clock()
        return log, position

    def _find(self, records: Iterable[LogRecord], now: float, wall: float) -> Iterable[_Found]:
        found: dict[Hashable, _Found] = {}
        for record in records:
            self._records += 1
            if record.facility != KERNEL and not self._injected:
                continue
            what, text = self._parse(record)
            if what is None:
                continue
            # The log's clock drifts from ours by seconds a month; what is new was written since we last saw the end.
            seconds = min(now, max(record.seconds, self._drained_at))
            if not self._count(what, wall - now + seconds):
                continue
            key = _identity(what)
            if key in found:
                found[key].count += 1
            elif len(found) < self._max_events:
                found[key] = _Found(what, text, seconds)
            else:
                self._crowded += 1
        return found.values()

    def _parse(self, record: LogRecord) -> tuple[Finding | None, str]:
        """What the record reports, and its text, put together with the one before if it continues that."""
        if record.continued and not self._unfinished:  # any text may be in the middle, as the name of a cpuset
            return None, record.text
        text = (self._unfinished + record.text)[:MESSAGE_CHARS] if record.continued else record.text
        if not record.continued and (victim := parse_oom_victim(text)) is not None:
            if len(self._victims) >= _MAX_VICTIMS:
                self._victims.clear()
            self._victims[victim[0]] = victim[1]
        what = parse_message(text)
        self._unfinished = text if what is None else ""
        return self._of_record(what), text

    def _of_record(self, what: Finding | None) -> Finding | None:
        """A device that a record of the firmware names gets the severity that the record began with."""
        if not isinstance(what, Trouble) or "record" not in what.data:
            return what
        number = what.data["record"]
        if what.kind == "mce":
            self._record = number, str(what.data["severity"])
            return what
        known, severity = self._record
        if known != number:
            return None
        return Trouble(what.kind, {**what.data, "severity": _BY_FIRMWARE[severity]})

    def _count(self, what: Finding, at: float) -> bool:
        """Count it, unless another source of Xids has already."""
        if isinstance(what, Xid):
            source = "kmsg, inferred" if what.inferred else "kmsg"
            return self._ledger.report(what.code, what.pci_bus_id, at=at, source=source)
        if isinstance(what, Sxid):
            self._switch(what.pci_bus_id)[what.severity] += 1
        else:
            self._events[what.kind] += 1
        return True

    def _switch(self, pci: str) -> Counter[str]:
        if pci not in self._sxids and len(self._sxids) >= _MAX_SWITCHES:
            pci = "other"
        return self._sxids.setdefault(pci, Counter(dict.fromkeys(SEVERITIES, 0)))

    def _event(self, entry: _Found, at: float) -> Event:
        what, message = entry.what, " ".join(entry.text.split())[:_MAX_MESSAGE]
        if isinstance(what, Xid):
            job = self._gpu_owners.jobs_of.get(what.pid or 0, "")
            return xid_event(what, at=at, source="kmsg", count=entry.count, where={"job": job} if job else {})
        if isinstance(what, Sxid):
            return Event("sxid", at, message, {**what._asdict(), "count": entry.count, "source": "kmsg"})
        data: dict[str, object] = {**what.data, "count": entry.count, "source": "kmsg"}
        pid = what.data.get("pid")
        if what.kind == "oom_kill" and isinstance(pid, int):
            data["cgroup"] = group = self._victims.pop(pid, "")
            data["job"] = self._gpu_owners.number(job_of_group(group))
        return Event(what.kind, at, message, data)

    def _samples(self, log: KernelLog, position: Position) -> Iterator[Sample]:
        self._ledger.expect(self._pci_devices("driver/nvidia/gpus"))
        yield from self._ledger.samples()
        for pci in self._pci_devices("driver/nvidia-nvswitch/devices"):
            self._switch(pci)
        for pci, severities in self._sxids.items():
            for severity, count in severities.items():
                yield Sample(SXIDS, count, (pci, severity))
        for kind, count in self._events.items():
            yield Sample(EVENTS, count, (kind,))
        yield Sample(RECORDS, self._records)
        yield Sample(DROPPED, log.overrun, ("overrun",))
        yield Sample(DROPPED, log.malformed, ("malformed",))
        yield Sample(DROPPED, self._crowded, ("crowded",))
        yield Sample(KEPT, float(position.kept))

    def _pci_devices(self, folder: str) -> list[str]:
        """PCI addresses of the driver's devices; listing them asks no device, so it cannot hang on a lost GPU."""
        try:
            names = sorted(path.name for path in (self._proc / folder).iterdir())
        except OSError:
            return []
        return [bus_id(name) for name in names if re.fullmatch(ADDRESS, name)]


def _make(settings: KmsgSettings, context: Context) -> KmsgCollector:
    ledger = context.shared(XidLedger)
    ledger.ignored = frozenset(settings.ignored_xids)
    return KmsgCollector(
        context.state and context.state / "kmsg.json", ledger=ledger, gpu_owners=context.shared(GpuOwners)
    )


COLLECTOR = Plugin(
    "kmsg",
    KmsgSettings,
    _make,
    {**XID_LABELS, **LABELS},
    witness=True,
)
