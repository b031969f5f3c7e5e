"""The series of the storage collectors, and the pure functions from the kernel's numbers to samples."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator
from typing import Final, NamedTuple

from opsd.collectors.base import Metric, MetricKind, MonotonicCounter, Sample
from opsd.collectors.lib.storage.mounts import Mount, NfsMount

_SECTOR_BYTES: Final = 512


def _storage(name: str, help_text: str, unit: str = "", *labels: str, kind: MetricKind = "gauge") -> Metric:
    return Metric(f"opsd_storage_{name}", help_text, kind, unit, labels)


IOS = _storage("io_total", "Requests completed by the disk.", "", "device", "op", kind="counter")
IO_SECONDS = _storage(
    "io_seconds_total",
    "Time the requests took, added up; its rate is the mean queue length.",
    "seconds",
    "device",
    "op",
    kind="counter",
)
IO_BYTES = _storage("io_bytes_total", "Data moved.", "bytes", "device", "op", kind="counter")
IO_LATENCY = _storage(
    "io_latency_seconds",
    "Mean time of the requests completed since the last collection; none without requests.",
    "seconds", "device", "op",
)  # fmt: skip
BUSY = _storage("busy_seconds_total", "Time with at least one request under way.", "seconds", "device", kind="counter")
IN_FLIGHT = _storage("in_flight", "Requests under way.", "", "device")
ARRAY_MISSING = _storage(
    "array_missing_disks",
    "Disks that an array of Linux software RAID lacks, and that it is not rebuilding; -1 if the array has failed.",
    "",
    "device",
)
MOUNT_INFO = _storage(
    "mount_info",
    "A mounted file system; disk is the label device of the disk under it.",
    "", "mount", "fstype", "source", "disk", "options",
    kind="info",
)  # fmt: skip
READ_ONLY = _storage("read_only", "1 if the file system is mounted read-only.", "", "mount")
SIZE = _storage("size_bytes", "Size of the file system.", "bytes", "mount")
AVAILABLE = _storage("available_bytes", "Space left for users other than root.", "bytes", "mount")
INODES = _storage("inodes", "Inodes of the file system; none on those that make them as needed.", "", "mount")
INODES_FREE = _storage("inodes_free", "Inodes left.", "", "mount")
REACHABLE = _storage(
    "reachable",
    "1 if the network file system answers, 0 if it answers with an error; none while it hangs.",
    "",
    "mount",
)
RESPONSE = _storage("response_seconds", "Time a network file system took to tell its size.", "seconds", "mount")
NFS_CALLS = _storage("nfs_operations_total", "NFS operations completed.", "", "mount", "op", kind="counter")
NFS_SECONDS = _storage(
    "nfs_seconds_total", "Time callers waited for NFS operations, added up.", "seconds", "mount", "op", kind="counter"
)
NFS_ROUND_TRIP = _storage(
    "nfs_round_trip_seconds_total",
    "The part of that time which server and network took.",
    "seconds", "mount", "op",
    kind="counter",
)  # fmt: skip
NFS_RETRANSMITS = _storage("nfs_retransmits_total", "NFS requests sent again.", "", "mount", "op", kind="counter")
NFS_TIMEOUTS = _storage("nfs_timeouts_total", "NFS requests that timed out.", "", "mount", "op", kind="counter")
NFS_LATENCY = _storage(
    "nfs_latency_seconds",
    "Mean time of the operations completed since the last collection; none without operations.",
    "seconds", "mount", "op",
)  # fmt: skip
NFS_BYTES = _storage(
    "nfs_bytes_total", "Data from (read) and to (write) the server.", "bytes", "mount", "op", kind="counter"
)
REFAULTS = _storage(
    "page_refaults_total", "File pages read again soon after they had been evicted from the cache.", kind="counter"
)
RECLAIMED = _storage("pages_reclaimed_total", "Pages evicted from memory.", kind="counter")
MAJOR_FAULTS = _storage("major_faults_total", "Page faults that had to wait for a disk.", kind="counter")

MOUNT_LABEL: Final = {"mount": "mounts of disks, networks and runs, 64 at most"}
DISK_LABELS: Final = {
    "device": "disks, 64 at most",
    "op": "read, write, discard, flush; 7 operations of NFS",
    "fstype": "one per mount",
    "source": "one per mount",
    "disk": "one per mount",
    "options": "one per mount",
}

DISK_METRICS: Final = (IOS, IO_SECONDS, IO_BYTES, IO_LATENCY, BUSY, IN_FLIGHT)
SPACE_METRICS: Final = (SIZE, AVAILABLE, INODES, INODES_FREE)
NFS_METRICS: Final = (NFS_CALLS, NFS_SECONDS, NFS_ROUND_TRIP, NFS_RETRANSMITS, NFS_TIMEOUTS, NFS_LATENCY, NFS_BYTES)
CACHE_METRICS: Final = (REFAULTS, RECLAIMED, MAJOR_FAULTS)

_VIRTUAL_DISK = re.compile(r"(?:loop|ram|zram|sr|fd|nbd)\d+|nvme\d+c\d+n\d+")


def is_disk(name: str) -> bool:
    """True for a name in /sys/block that is worth watching: no loop or memory device, no single path of a multipath."""
    return _VIRTUAL_DISK.fullmatch(name) is None


_ARRAY = re.compile(r"^(?P<name>md\w+) : (?P<state>\w+).*\n(?P<more>(?:[ \t]+.*\n?)*)", re.MULTILINE)
_MEMBERS = re.compile(r"\[(\d+)/(\d+)\]")


def parse_mdstat(text: str) -> dict[str, int]:
    """Disks that each running array of /proc/mdstat lacks; none while it is being rebuilt, -1 if it has failed."""
    found = {}
    for array in _ARRAY.finditer(text):
        members = _MEMBERS.search(array["more"])
        if array["state"] == "broken":
            found[array["name"]] = -1
        elif array["state"] == "active":
            rebuilt = members is None or re.search(r"(?:recovery|reshape) *=", array["more"])
            found[array["name"]] = 0 if rebuilt or members is None else int(members[1]) - int(members[2])
    return found


class DiskOperation(NamedTuple):
    """Running totals of one kind of request; ``milliseconds`` is a counter of 32 bits, ``sectors`` None for flushes."""

    op: str
    calls: int
    sectors: int | None
    milliseconds: int


class DiskStat(NamedTuple):
    """A disk's statistics; ``busy_milliseconds`` is a counter of 32 bits."""

    operations: tuple[DiskOperation, ...]
    in_flight: int
    busy_milliseconds: int


def parse_disk_stat(text: str) -> DiskStat:
    """A /sys/block/*/stat file of any kernel (Documentation/block/stat.rst). Raises ValueError for something else."""
    fields = [int(field) for field in text.split()]
    if len(fields) < 11:
        raise ValueError(f"not the statistics of a disk: {text[:80]!r}")
    operations = [
        DiskOperation("read", fields[0], fields[2], fields[3]),
        DiskOperation("write", fields[4], fields[6], fields[7]),
    ]
    if len(fields) >= 15:
        operations.append(DiskOperation("discard", fields[11], fields[13], fields[14]))
    if len(fields) >= 17:
        operations.append(DiskOperation("flush", fields[15], None, fields[16]))
    return DiskStat(tuple(operations), fields[8], fields[9])


class Totals:
    """Turns readings into samples; remembers the last ones for counters that wrap and for mean latencies."""

    def __init__(self) -> None:
        self._totals = MonotonicCounter()
        self._last: dict[Hashable, tuple[int, float]] = {}

    def disk(self, device: str, stat: DiskStat) -> Iterator[Sample]:
        """The samples of a disk."""
        for operation in stat.operations:
            labels = (device, operation.op)
            calls = self._totals.add(("calls", labels), operation.calls)
            seconds = self._totals.add(("ms", labels), operation.milliseconds, bits=32) / 1e3
            yield Sample(IOS, calls, labels)
            yield Sample(IO_SECONDS, seconds, labels)
            if operation.sectors is not None:
                sectors = self._totals.add(("sectors", labels), operation.sectors)
                yield Sample(IO_BYTES, sectors * _SECTOR_BYTES, labels)
            if (latency := self._mean(labels, calls, seconds)) is not None:
                yield Sample(IO_LATENCY, latency, labels)
        yield Sample(BUSY, self._totals.add(("busy", device), stat.busy_milliseconds, bits=32) / 1e3, (device,))
        yield Sample(IN_FLIGHT, stat.in_flight, (device,))

    def nfs(self, mount: NfsMount) -> Iterator[Sample]:
        """The samples of an NFS mount. Its counters are 64 bits wide and start over when it is remounted."""
        yield Sample(NFS_BYTES, mount.read, (mount.point, "read"))
        yield Sample(NFS_BYTES, mount.written, (mount.point, "write"))
        for operation in mount.operations:
            labels = (mount.point, operation.name.lower())
            yield Sample(NFS_CALLS, operation.calls, labels)
            yield Sample(NFS_SECONDS, operation.total_s, labels)
            yield Sample(NFS_ROUND_TRIP, operation.round_trip_s, labels)
            yield Sample(NFS_RETRANSMITS, max(0, operation.sent - operation.calls), labels)
            yield Sample(NFS_TIMEOUTS, operation.timeouts, labels)
            if (latency := self._mean(("nfs", labels), operation.calls, operation.total_s)) is not None:
                yield Sample(NFS_LATENCY, latency, labels)

    def _mean(self, key: Hashable, calls: int, seconds: float) -> float | None:
        last_calls, last_seconds = self._last.get(key, (calls, seconds))
        self._last[key] = calls, seconds
        if calls <= last_calls or seconds < last_seconds:
            return None
        return (seconds - last_seconds) / (calls - last_calls)


def space(mount: Mount, status: os.statvfs_result) -> Iterator[Sample]:
    """The samples of a file system's space."""
    labels = (mount.point,)
    yield Sample(SIZE, status.f_blocks * status.f_frsize, labels)
    yield Sample(AVAILABLE, status.f_bavail * status.f_frsize, labels)
    if status.f_files:
        yield Sample(INODES, status.f_files, labels)
        yield Sample(INODES_FREE, status.f_ffree, labels)


def cache(vmstat: str) -> Iterator[Sample]:
    """The samples of /proc/vmstat; kernels name and split these counters differently."""
    values = {
        name: int(value)
        for name, _, value in (line.partition(" ") for line in vmstat.splitlines())
        if value.isdecimal()
    }
    sources = {
        REFAULTS: ("workingset_refault_file",) if "workingset_refault_file" in values else ("workingset_refault",),
        RECLAIMED: ("pgsteal_kswapd", "pgsteal_direct"),
        MAJOR_FAULTS: ("pgmajfault",),
    }
    for metric, names in sources.items():
        if any(name in values for name in names):
            yield Sample(metric, sum(values.get(name, 0) for name in names))
