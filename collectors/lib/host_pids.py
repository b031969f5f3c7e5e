"""Processes in containers: which process of this machine it is that has another number in its own PID namespace.

Rank pages and ``run.json`` have the numbers by which processes know themselves. The kernel tells both numbers (NSpid in
proc_pid_status(5)), and the start time, in clock ticks since boot, is the same in every PID namespace.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from opsd.collectors.lib.processes import read_kernel_text, start_time

SEARCH_S: Final = 1.0
"""Least time between two searches through all processes."""
RENEW_S: Final = 60.0
MAX_KNOWN: Final = 4096
"""Answers that are remembered."""


class _Process(NamedTuple):
    """A process of the user ``owner`` by its number here, its number in its own PID namespace and its start."""

    owner: int
    pid: int
    inside: int
    start: int


class HostPids:
    """Shared by the collectors of an agent; any thread may ask. ``proc`` is procfs.

    What is not there by its own number is searched for once: a process that a file names has begun before.
    """

    def __init__(self, proc: Path = Path("/proc"), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock = proc, clock
        self._known: dict[Hashable, _Process | None] = {}
        self._nested: tuple[_Process, ...] = ()
        self._searched = -math.inf
        self._guard = threading.Lock()

    def find(self, owner: int, pid: int, start: int) -> int | None:
        """The number here of the process of user ``owner`` that has the number ``pid`` inside; None if it is gone."""
        if start_time(pid, self._proc) == start:
            return pid
        key = (owner, pid, start)
        return self._look(owner, key, lambda one: (one.owner, one.inside, one.start) == key)

    def beside(self, owner: int, rank: int, inside: int) -> int | None:
        """The number here of the process with the number ``inside`` in the PID namespace of the process ``rank``."""
        if (namespace := self._namespace(rank)) is None:
            return None
        # Numbers are used again, so an answer is good for a minute.
        key, same = (owner, namespace, inside, self._clock() // RENEW_S), (owner, inside)
        return self._look(
            owner, key, lambda one: (one.owner, one.inside) == same and self._namespace(one.pid) == namespace
        )

    def _look(self, owner: int, key: Hashable, fits: Callable[[_Process], bool]) -> int | None:
        with self._guard:
            if key not in self._known:
                found = self._first(fits)
                if found is None:
                    if self._clock() - self._searched < SEARCH_S:
                        return None
                    self._searched, self._nested = self._clock(), tuple(self._search(of_root=owner == 0))
                    found = self._first(fits)
                self._known[key] = found
                if len(self._known) > MAX_KNOWN:
                    del self._known[next(iter(self._known))]
            found = self._known[key]
        return found.pid if found is not None and self._lives(found) else None

    def _first(self, fits: Callable[[_Process], bool]) -> _Process | None:
        return next((one for one in self._nested if fits(one) and self._lives(one)), None)

    def _lives(self, process: _Process) -> bool:
        return start_time(process.pid, self._proc) == process.start

    def _search(self, *, of_root: bool) -> Iterator[_Process]:
        """The processes in nested PID namespaces. Root's, most of a node's, are read only if they are asked for."""
        with os.scandir(self._proc) as entries:
            numbered = [entry for entry in entries if entry.name.isdecimal()]
        for entry in numbered:
            with contextlib.suppress(OSError, ValueError):  # ended meanwhile
                if not of_root and entry.stat().st_uid == 0:
                    continue
                pid = int(entry.name)
                status = read_kernel_text(f"{self._proc}/{pid}/status")
                _, *inside = status.partition("\nNSpid:")[2].partition("\n")[0].split()
                if inside and (start := start_time(pid, self._proc)) is not None:
                    owner = int(status.partition("\nUid:")[2].split(maxsplit=1)[0])
                    yield _Process(owner, pid, int(inside[-1]), start)

    def _namespace(self, pid: int) -> int | None:
        try:
            return (self._proc / str(pid) / "ns/pid").stat().st_ino
        except OSError:
            return None
