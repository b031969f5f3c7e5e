"""Whether the processes of a rank do anything: their CPU time, the bytes they move, and which processes there are.

Most of what waits for a GPU shows here as well: a program waits for single kernels, and uses CPU time between them.
A process that waits for a long kernel without CPU time is seen in ``gpus``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
SAMPLE_S = 2.0
BUSY_SHARE = 0.03
"""Share of one core above which processes are at work; threads that poll, such as NCCL's watchdog, use less."""
MOVED_BYTES = 4096
"""Bytes read and written in one interval from which on processes are at work."""
WRITING_BYTES = 1 << 20
"""Bytes written in one interval from which on a rank seems to save something."""
MAX_PROCESSES = 256


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of a rank's processes so far: seconds of CPU time, bytes moved, bytes written.

    ``pids`` are the processes, ``stopped`` those that a signal has stopped. ``main`` has for each process how often its
    main thread has waited for something, and the bytes that the process has moved.
    """

    cpu_s: float
    moved: int
    written: int
    pids: frozenset[int]
    stopped: frozenset[int] = frozenset()
    main: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Activity:
    """``active``: the monotonic second in which a rank was last seen to do anything; it did nothing until ``seen``.

    ``writing``: it has just written files. ``stopped_child``: nothing moves, and this process is stopped by a signal.
    """

    active: float
    seen: float
    writing: bool = False
    stopped_child: int | None = None


@dataclass(slots=True)
class _Known:
    at: float
    usage: Usage | None
    activity: Activity


class ActivityTracker:
    """Compares the usage of ranks every ``sample_s`` seconds; ``read`` returns it by pid."""

    def __init__(self, sample_s: float = SAMPLE_S, read: Callable[[int], Usage | None] | None = None) -> None:
        self._sample_s = sample_s
        self._read = read or read_usage
        self._known: dict[int, _Known] = {}

    def look(self, pid: int, now: float) -> Activity:
        """The activity of the rank whose first process is ``pid``."""
        known = self._known.get(pid)
        if known is None:
            known = self._known[pid] = _Known(now, self._read(pid), Activity(now, now))
        elif now - known.at >= self._sample_s:
            usage = self._read(pid)
            known.activity = compare(known.usage, usage, now - known.at, known.activity, now)
            known.at, known.usage = now, usage
        return known.activity

    def note_activity(self, pid: int, now: float) -> None:
        """The rank was seen to move by other means."""
        if pid in self._known:
            self._known[pid].activity = Activity(now, now)

    def forget(self) -> None:
        """There are other ranks now."""
        self._known.clear()


def compare(before: Usage | None, usage: Usage | None, seconds: float, activity: Activity, now: float) -> Activity:
    """The activity at ``now`` after ``seconds`` that began with ``before``; what cannot be read counts as active."""
    if before is None or usage is None or before.pids != usage.pids:
        return Activity(now, now)
    written = usage.written - before.written
    busy = usage.cpu_s - before.cpu_s >= BUSY_SHARE * seconds or usage.moved - before.moved >= MOVED_BYTES
    busy = busy or any(_trickles(before.main.get(pid), after) for pid, after in usage.main.items())
    stopped = min(usage.stopped, default=None)
    return Activity(now if busy else activity.active, now, written >= WRITING_BYTES, None if busy else stopped)


def _trickles(before: tuple[int, int] | None, after: tuple[int, int]) -> bool:
    """Whether a process moves a few bytes, and its main thread takes part: other threads poll and log by themselves."""
    return before is not None and after[0] > before[0] and after[1] > before[1]


def read_usage(pid: int, proc: Path = Path("/proc")) -> Usage | None:
    """The usage of ``pid`` and its descendants (proc(5)); None if it cannot be read."""
    cpu, moved, written = 0, 0, 0
    pids, stopped, main = set[int](), set[int](), dict[int, tuple[int, int]]()
    for each in process_tree(pid, proc):
        fields = _stat(each, proc)
        if fields is None:
            continue
        pids.add(each)
        if fields[0] == "T":
            stopped.add(each)
        cpu += sum(map(int, fields[11:15]))
        more = _io(each, proc)
        moved, written = moved + sum(more), written + more[1]
        main[each] = (_waits(each, proc), sum(more))
    if pid not in pids:
        return None
    return Usage(cpu / _TICKS, moved, written, frozenset(pids), frozenset(stopped), main)


def process_tree(pid: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """The process and its descendants, ``MAX_PROCESSES`` at most."""
    found, waiting = {pid}, [pid]
    while waiting and len(found) <= MAX_PROCESSES:
        each = waiting.pop()
        yield each
        with contextlib.suppress(OSError):
            for task in (proc / str(each) / "task").iterdir():
                with contextlib.suppress(OSError):
                    children = {int(child) for child in (task / "children").read_text(encoding="ascii").split()}
                    waiting += children - found
                    found |= children


def _stat(pid: int, proc: Path) -> list[str] | None:
    try:
        return (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _waits(pid: int, proc: Path) -> int:
    """How often the main thread of the process has given up its core to wait for something."""
    try:
        text = (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition("\nvoluntary_ctxt_switches:")[2].split(None, 1)[0])
    except (OSError, ValueError, IndexError):
        return 0


def _io(pid: int, proc: Path) -> tuple[int, int]:
    """Bytes that the process has read and written in system calls, (0, 0) if the kernel does not tell."""
    try:
        lines = (proc / str(pid) / "io").read_text(encoding="ascii").splitlines()
        values = {key: int(value) for key, _, value in (line.partition(": ") for line in lines)}
        return values["rchar"], values["wchar"]
    except (OSError, ValueError, KeyError):
        return 0, 0
