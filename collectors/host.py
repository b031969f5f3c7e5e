"""The node's own limits on a training job: processors, memory, pressure, file systems and processes.

node_exporter exports more of a host and does it well; this is what detection needs, from one look per tick.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import psutil
from pydantic import Field

from opsd.collectors.base import Metric, MetricKind, Plugin, Reading, Sample
from opsd.collectors.lib.clock import ClockState, read_clock
from opsd.collectors.lib.pci import LABELS as BUS_LABELS
from opsd.collectors.lib.pci import METRICS as BUS_METRICS
from opsd.collectors.lib.pci import GpuBus
from opsd.collectors.lib.storage import mount_of, read_mounts, way_to
from opsd.settings.sections import AnyPath, CollectorSettings

_NUMA_NODES: Final = Path("devices/system/node")
RESOURCES: Final = ("cpu", "memory", "io")


def _host(name: str, help_text: str, unit: str = "", *labels: str, kind: MetricKind = "gauge") -> Metric:
    return Metric(f"opsd_host_{name}", help_text, kind, unit, labels)


CPU = _host("cpu_ratio", "Share of processor time since the last collection.", "ratio", "mode")
CPUS = _host("cpus", "Logical processors.")
LOAD = _host("load_average", "Runnable and uninterruptible tasks, averaged.", "", "minutes")
MEMORY_TOTAL = _host("memory_total_bytes", "Memory installed.", "bytes")
MEMORY_AVAILABLE = _host("memory_available_bytes", "Memory that can be had without swapping.", "bytes")
MEMORY_SHARED = _host("memory_shared_bytes", "Shared memory, tmpfs included.", "bytes")
SWAP_TOTAL = _host("swap_total_bytes", "Swap space.", "bytes")
SWAP_USED = _host("swap_used_bytes", "Swap space in use.", "bytes")
PRESSURE = _host(
    "pressure_seconds_total",
    "Time in which some or all (full) tasks waited for a resource.",
    "seconds", "resource", "kind",
    kind="counter",
)  # fmt: skip
BOOT_TIME = _host("boot_time_seconds", "When the node was started, in seconds since the epoch.", "seconds")
DISK_SIZE = _host("filesystem_size_bytes", "Size of the file system.", "bytes", "mount")
DISK_AVAILABLE = _host("filesystem_available_bytes", "Space left for users other than root.", "bytes", "mount")
INODES = _host("filesystem_inodes", "Inodes of the file system; none on those that make them as needed.", "", "mount")
INODES_FREE = _host("filesystem_inodes_free", "Inodes left.", "", "mount")
PROCESSES = _host("processes", "Processes by state, counted every few seconds.", "", "state")
BLOCKED = _host("tasks_blocked", "Tasks that wait for I/O right now.")
OPEN_FILES = _host("open_files", "File handles in use.")
OPEN_FILES_MAX = _host("open_files_max", "File handles the kernel gives out at most.")

CLOCK_SYNCED = _host("clock_synchronized", "1 if a service keeps the wall clock right, as the kernel sees it.")
CLOCK_OFFSET = _host(
    "clock_offset_seconds", "By how much the kernel says that the wall clock is off; always 0 under chrony.", "seconds"
)
CLOCK_ERROR = _host("clock_max_error_seconds", "By how much the wall clock may be off at most.", "seconds")
NUMA_TOTAL = _host("numa_memory_total_bytes", "Memory of the NUMA node.", "bytes", "numa_node")
NUMA_FREE = _host("numa_memory_free_bytes", "Memory of the NUMA node that is not used at all.", "bytes", "numa_node")
NUMA_MISSED = _host(
    "numa_missed_pages_total", "Pages meant for the NUMA node that had to be taken from another.", "", "numa_node",
    kind="counter",
)  # fmt: skip

METRICS: Final = (
    CPU, CPUS, LOAD, MEMORY_TOTAL, MEMORY_AVAILABLE, MEMORY_SHARED, SWAP_TOTAL, SWAP_USED, PRESSURE, BOOT_TIME,
    DISK_SIZE, DISK_AVAILABLE, INODES, INODES_FREE, PROCESSES, BLOCKED, OPEN_FILES, OPEN_FILES_MAX,
    CLOCK_SYNCED, CLOCK_OFFSET, CLOCK_ERROR, NUMA_TOTAL, NUMA_FREE, NUMA_MISSED, *BUS_METRICS,
)  # fmt: skip
LABELS: Final = {
    **BUS_LABELS,
    "mode": "modes of processor time",
    "minutes": "1, 5, 15",
    "resource": "cpu, memory, io",
    "kind": "some and full for pressure",
    "mount": "mounts of the settings",
    "state": "states of processes",
    "numa_node": "one per NUMA node",
}


def parse_pressure(text: str) -> dict[str, float]:
    """Seconds stalled by kind (some, full) from a file of /proc/pressure. Raises ValueError if it is something else."""
    stalled = {}
    for line in text.splitlines():
        kind, *fields = line.split()
        values = dict(field.split("=", 1) for field in fields)
        if "total" not in values:
            raise ValueError(f"not a pressure file: {line[:80]!r}")
        stalled[kind] = int(values["total"]) / 1e6
    return stalled


def cpu_ratios(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Share of each mode in the processor time between two readings; empty if no time has passed.

    The kernel's idle and I/O wait counters can go back a little; a negative difference counts as none. Time of virtual
    machines (guest) is left out, the kernel has it in user and nice already.
    """
    modes = [mode for mode in after if mode in before and not mode.startswith("guest")]
    spent = {mode: max(0.0, after[mode] - before[mode]) for mode in modes}
    total = sum(spent.values())
    return {mode: seconds / total for mode, seconds in spent.items()} if total > 0 else {}


class NumaNode(NamedTuple):
    """One node. ``missed`` are allocations that were meant for it and went elsewhere, since the start."""

    name: str
    total_bytes: int
    free_bytes: int
    missed: int


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name from a node's ``meminfo``, whose lines begin with "Node 0 MemTotal:  131 kB"."""
    fields = (line.split() for line in text.splitlines())
    return {field[2].rstrip(":"): int(field[3]) * 1024 for field in fields if len(field) == 5}


def parse_numastat(text: str) -> dict[str, int]:
    """Counts by name from a node's ``numastat``."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def read_numa_nodes(sys: Path) -> list[NumaNode]:
    """The nodes that have memory, by number; none on a kernel without NUMA."""
    found = []
    for folder in sorted((sys / _NUMA_NODES).glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            memory = parse_meminfo((folder / "meminfo").read_text(encoding="utf-8"))
            counts = parse_numastat((folder / "numastat").read_text(encoding="utf-8"))
        except FileNotFoundError:  # taken offline between the listing and now
            continue
        if memory.get("MemTotal"):
            missed = counts.get("numa_foreign", 0)
            found.append(NumaNode(folder.name[4:], memory["MemTotal"], memory.get("MemFree", 0), missed))
    return found


class HostSettings(CollectorSettings):
    """Processors, memory and file systems of the node."""

    mounts: tuple[AnyPath, ...] = Field(
        default=(Path("/"), Path("/dev/shm")),  # noqa: S108
        strict=False,
        description="Mount points whose free space is watched, besides all disks and network file systems.",
    )


class HostCollector:
    """The host behind ``proc`` and ``sys``, and the file systems at ``mounts``.

    Left out are those that do not exist or cannot be read, and those of networks, whose servers may block the
    caller: they are ``StorageNetCollector``'s.

    A look at a hundred processes takes a millisecond, and users may start hundreds of thousands. So it is done in
    parts, every ``scan_s`` seconds. The NUMA nodes and the PCI bus are read as often.
    """

    name = "host"
    metrics = METRICS

    def __init__(
        self,
        proc: Path = Path("/proc"),
        mounts: Sequence[Path] = (Path("/"), Path("/dev/shm")),  # noqa: S108  # only its size is read
        *,
        sys: Path = Path("/sys"),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], ClockState] = read_clock,
        scan_s: float = 10.0,
    ) -> None:
        self._proc = proc
        self._sys = sys
        self._wall_clock = wall_clock
        self._numa: Sequence[NumaNode] = ()
        self._bus, self._gpus = GpuBus(proc, sys), tuple[Sample, ...]()
        self._mounts = tuple(mounts)
        self._clock = clock
        self._scan_s = scan_s
        self._process_states = ProcessStates(proc, clock)
        self._cpu: Mapping[str, float] = {}
        self._scanned: float | None = None

    def collect(self) -> Reading:
        """Read the host once. Raises OSError if ``proc`` is not there."""
        with _psutil_at(self._proc):
            samples = [*self._processors(), *_memory()]
        samples += self._pressure()
        samples += self._files()
        samples += self._time()
        samples += self._scanned_now()
        for mount in self._local_mounts():
            samples += _filesystem(mount)
        return Reading(tuple(samples))

    def _processors(self) -> Iterator[Sample]:
        cpu = psutil.cpu_times()._asdict()
        # The first look has no earlier one: it shows the average since boot, so that no series is missing.
        for mode, ratio in cpu_ratios(self._cpu or dict.fromkeys(cpu, 0.0), cpu).items():
            yield Sample(CPU, ratio, (mode,))
        self._cpu = cpu
        yield Sample(CPUS, psutil.cpu_count() or 1)
        yield Sample(BOOT_TIME, psutil.boot_time())
        for minutes, load in zip(("1", "5", "15"), self._read("loadavg").split(), strict=False):
            yield Sample(LOAD, float(load), (minutes,))

    def _pressure(self) -> Iterator[Sample]:
        for resource in RESOURCES:
            with contextlib.suppress(FileNotFoundError):  # kernels without PSI
                for kind, seconds in parse_pressure(self._read(f"pressure/{resource}")).items():
                    yield Sample(PRESSURE, seconds, (resource, kind))

    def _files(self) -> Iterator[Sample]:
        used, _, most = self._read("sys/fs/file-nr").split()
        yield Sample(OPEN_FILES, int(used))
        yield Sample(OPEN_FILES_MAX, int(most))

    def _time(self) -> Iterator[Sample]:
        state = self._wall_clock()
        yield Sample(CLOCK_SYNCED, float(state.synchronised))
        if state.synchronised:
            yield Sample(CLOCK_OFFSET, state.offset_s)
            yield Sample(CLOCK_ERROR, state.max_error_s)

    def _scanned_now(self) -> Iterator[Sample]:
        blocked = next((line for line in self._read("stat").splitlines() if line.startswith("procs_blocked ")), None)
        if blocked is not None:
            yield Sample(BLOCKED, int(blocked.split()[1]))
        now = self._clock()
        if self._scanned is None or now - self._scanned >= self._scan_s:
            self._numa, self._scanned = read_numa_nodes(self._sys), now
            self._gpus = tuple(self._bus.samples())
            self._process_states.begin()
        for state, count in self._process_states.go_on().items():
            yield Sample(PROCESSES, count, (state,))
        for node in self._numa:
            yield Sample(NUMA_TOTAL, node.total_bytes, (node.name,))
            yield Sample(NUMA_FREE, node.free_bytes, (node.name,))
            yield Sample(NUMA_MISSED, node.missed, (node.name,))
        yield from self._gpus

    def _local_mounts(self) -> Iterator[Path]:
        mounts = read_mounts(self._proc)
        for point in self._mounts:
            mount = mount_of(str(point), mounts)
            if mount is None or not (mount.network or way_to(mount, mounts)):
                yield point

    def _read(self, name: str) -> str:
        return (self._proc / name).read_text(encoding="utf-8")


@contextlib.contextmanager
def _psutil_at(proc: Path) -> Iterator[None]:
    before, psutil.PROCFS_PATH = psutil.PROCFS_PATH, str(proc)
    try:
        yield
    finally:
        psutil.PROCFS_PATH = before


def _memory() -> Iterator[Sample]:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    yield Sample(MEMORY_TOTAL, memory.total)
    yield Sample(MEMORY_AVAILABLE, memory.available)
    yield Sample(MEMORY_SHARED, memory.shared)
    yield Sample(SWAP_TOTAL, swap.total)
    yield Sample(SWAP_USED, swap.used)


def _filesystem(mount: Path) -> Iterator[Sample]:
    try:
        info = os.statvfs(mount)
    except OSError:
        return
    labels = (str(mount),)
    yield Sample(DISK_SIZE, info.f_blocks * info.f_frsize, labels)
    yield Sample(DISK_AVAILABLE, info.f_bavail * info.f_frsize, labels)
    if info.f_files:
        yield Sample(INODES, info.f_files, labels)
        yield Sample(INODES_FREE, info.f_ffree, labels)


COLLECTOR = Plugin(
    "host", HostSettings, lambda settings, _context: HostCollector(mounts=settings.mounts), LABELS, witness=True
)


PROCESS_STATES: Final[Mapping[str, str]] = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
    "I": "idle",
}
"""State letters of proc_pid_stat(5)."""
LOOK_S: Final = 0.05
"""Seconds that one look reads at most."""
_STEP: Final = 32


class ProcessStates:
    """Counts the processes below ``proc``, a part at each look, as users may start hundreds of thousands.

    A count that takes several looks is of no single moment.
    """

    def __init__(self, proc: Path, clock: Callable[[], float]) -> None:
        self._proc, self._clock = proc, clock
        self._letters: Iterator[str] | None = None
        self._counting = Counter[str]()
        self._counted: Mapping[str, int] = {}

    def begin(self) -> None:
        """Begin another count, unless one is under way."""
        if self._letters is None:
            self._letters, self._counting = _state_letters(self._proc), Counter()

    def go_on(self) -> Mapping[str, int]:
        """Count for a moment if a count is under way; the processes by state, every state, of the last whole one.

        Empty before the first. Raises OSError if ``proc`` is not there.
        """
        until = self._clock() + LOOK_S
        while self._letters is not None:
            part = list(islice(self._letters, _STEP))
            self._counting.update(PROCESS_STATES.get(letter, "other") for letter in part)
            if len(part) < _STEP:
                self._letters = None
                self._counted = {state: self._counting[state] for state in (*PROCESS_STATES.values(), "other")}
            elif self._clock() >= until:
                break
        return self._counted


def _state_letters(proc: Path) -> Iterator[str]:
    with os.scandir(proc) as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError), open(f"{entry.path}/stat", "rb", buffering=0) as file:  # it may end
                    yield chr(file.read(512).rpartition(b") ")[2][0])
