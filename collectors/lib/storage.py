"""Mounts, disks and NFS as the kernel tells of them, and their series.

What is mounted where, and how its NFS servers answer: parsers of /proc/PID/mountinfo and mountstats. Pure.

Formats: proc_pid_mountinfo(5), proc_pid_mountstats(5) and net/sunrpc/stats.c of the kernel.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from opsd.collectors.base import Metric, MetricKind, MonotonicCounter, Sample
from opsd.collectors.lib.processes import read_kernel_text

MAX_MOUNTS: Final = 64
"""What collectors export at most."""
NETWORK_TYPES: Final = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "panfs", "pvfs2", "smb3",
        "virtiofs", "wekafs",
    }
)  # fmt: skip
"""File systems that wait for another machine. Those of FUSE (``fuse.*``) count too, they wait for a process."""

DISK_TYPES: Final = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"})

NFS_OPERATIONS: Final = ("READ", "WRITE", "COMMIT", "OPEN", "LOOKUP", "GETATTR", "READDIR")

_MAX_OPTIONS: Final = 256
_OCTAL = re.compile(r"\\([0-3][0-7]{2})")


class Mount(NamedTuple):
    """A mount. ``device`` is "major:minor", ``options`` those of the mount and of the file system, with commas.

    ``read_only`` is the file system. A mount can be so for one namespace alone, and for a service that systemd protects
    all of them are.
    """

    device: str
    point: str
    fstype: str
    source: str
    options: str
    read_only: bool

    @property
    def network(self) -> bool:
        """True if what is in it can wait for another machine or process."""
        return self.fstype in NETWORK_TYPES or self._fuse

    @property
    def by_user(self) -> bool:
        """True if an ordinary user may have mounted it, as with fusermount3(1): the kernel writes who."""
        owners = [option for option in self.options.split(",") if option.startswith("user_id=")]
        return self._fuse and bool(owners) and owners != ["user_id=0"]

    @property
    def _fuse(self) -> bool:
        return self.fstype.partition(".")[0] in ("fuse", "fuseblk")


class NfsOperation(NamedTuple):
    """Running totals of one NFS operation on one mount, in seconds where not a count.

    ``sent`` counts transmissions, which are more than ``calls`` where requests were repeated; ``round_trip_s`` is what
    server and network took, ``total_s`` what the caller waited.
    """

    name: str
    calls: int
    sent: int
    timeouts: int
    round_trip_s: float
    total_s: float


class NfsMount(NamedTuple):
    """The traffic of an NFS mount; ``read`` and ``written`` are bytes from and to the server."""

    point: str
    read: int
    written: int
    operations: tuple[NfsOperation, ...]


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts in the order in which they were made; lines that make no sense are left out."""
    return [mount for line in text.split("\n") if (mount := _mount(line)) is not None]


def _mount(line: str) -> Mount | None:
    left, separator, right = line.partition(" - ")
    fields, of_fs = left.split(" "), right.split(" ")
    if not separator or len(fields) < 6 or len(of_fs) < 3:
        return None
    options = list(dict.fromkeys((*fields[5].split(","), *of_fs[2].split(","))))
    return Mount(
        device=fields[2],
        point=_unescape(fields[4]),
        fstype=of_fs[0],
        source=_unescape(of_fs[1]),
        options=",".join(options)[:_MAX_OPTIONS],
        read_only="ro" in of_fs[2].split(","),
    )


def _unescape(text: str) -> str:
    """Space, tab, line feed and backslash are written as octal escapes."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that ``path`` (absolute, without symbolic links) lies on; nothing is looked up on the disk."""
    found = None
    for mount in mounts:  # a later mount on the same point hides the earlier one
        inside = mount.point == "/" or path == mount.point or path.startswith(mount.point + "/")
        if inside and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def way_to(mount: Mount, mounts: Sequence[Mount]) -> list[Mount]:
    """The network mounts that the kernel looks through for the mount point, that of ``mount`` itself left out.

    They lie above it or, if they were made later, on it: users may mount a file system of their own on any folder of
    theirs. One at / is left out, as everything lies in it.
    """
    later = mounts[mounts.index(mount) + 1 :] if mount in mounts else ()
    return [
        *(m for m in mounts if m.network and m.point != "/" and mount.point.startswith(m.point + "/")),
        *(m for m in later if m.network and m.point == mount.point),
    ]


def storage_mounts(mounts: Sequence[Mount], paths: Iterable[str] = ()) -> list[Mount]:
    """The mounts that matter: disks, networks and those that ``paths`` lie on, each file system once.

    A file system mounted in several places is represented by the place with the shortest path. Those of users come
    last, so that no number of them leaves another one out.
    """
    wanted = {mount for path in paths if (mount := mount_of(path, mounts)) is not None}
    wanted |= {mount for mount in mounts if mount.fstype in DISK_TYPES or mount.network}
    once: dict[str, Mount] = {}
    for mount in sorted(wanted, key=lambda mount: (len(mount.point), mount.point)):
        once.setdefault(mount.device, mount)
    return sorted(once.values(), key=lambda mount: (mount.by_user, mount.point))


def read_mounts(proc: Path) -> list[Mount]:
    """All mounts of the running system. Raises OSError if ``proc`` is not there."""
    return parse_mountinfo(read_kernel_text(proc / "self/mountinfo"))


def parse_mountstats(text: str) -> list[NfsMount]:
    """The NFS mounts with their statistics; numbers that make no sense are left out."""
    found = []
    for block in re.split(r"^device ", text, flags=re.MULTILINE)[1:]:
        head, _, body = block.partition("\n")
        match = re.fullmatch(r"\S+ mounted on (\S+) with fstype nfs4? statvers=\S+", head.strip())
        if match is not None:
            read, written = _server_bytes(body)
            found.append(NfsMount(_unescape(match[1]), read, written, _operations(body)))
    return found


def _server_bytes(body: str) -> tuple[int, int]:
    """Fields 5 and 6 of the line "bytes:": what was read from and written to the server."""
    match = re.search(r"^\s*bytes:((?:\s+\d+){6})", body, re.MULTILINE | re.ASCII)
    if match is None:
        return 0, 0
    fields = match[1].split()
    return int(fields[4]), int(fields[5])


def _operations(body: str) -> tuple[NfsOperation, ...]:
    per_op = body.partition("per-op statistics")[2]
    found = []
    for name, numbers in re.findall(r"^\s*([A-Z_]+):((?:\s+\d+){8,9})\s*$", per_op, re.MULTILINE | re.ASCII):
        if name in NFS_OPERATIONS:
            calls, sent, timeouts, _, _, _, round_trip, total = (int(number) for number in numbers.split()[:8])
            found.append(NfsOperation(name, calls, sent, timeouts, round_trip / 1e3, total / 1e3))
    return tuple(found)


# The series of the storage collectors, and the pure functions from the kernel's numbers to samples.


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
