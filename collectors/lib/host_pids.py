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
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from opsd.collectors.lib.processes import read_kernel_text, start_time

SEARCH_S: Final = 1.0
"""Least time between two looks at the node's processes."""
LOOK_S: Final = 0.05
"""Seconds that one look takes at most; the next goes on there: users may start hundreds of thousands of processes."""
RENEW_S: Final = 60.0
MAX_KNOWN: Final = 4096
"""Answers, and open questions, that are remembered."""
MAX_NESTED: Final = 16_384
MAX_PER_OWNER: Final = 4096
MAX_ALIKE: Final = 256
"""Nested processes that a search remembers unasked: of all users, of one, and of one with the same number inside."""


class _Process(NamedTuple):
    """A process of the user ``owner`` by its number here, its number in its own PID namespace and its start."""

    owner: int
    pid: int
    inside: int
    start: int


class _Search:
    """A search through the node's processes, and the nested ones that it has found so far, by owner and number."""

    def __init__(self, number: int, processes: Iterator[_Process | None]) -> None:
        self.number, self.processes = number, processes
        self.found: defaultdict[tuple[int, int], list[_Process]] = defaultdict(list)
        self._of_owner: Counter[int] = Counter()

    def keep(self, process: _Process, asked: Callable[[_Process], bool]) -> None:
        """Remember it, if there is room or somebody has ``asked`` for it."""
        alike = self.found.get((process.owner, process.inside), ())
        room = self._of_owner[process.owner] < MAX_PER_OWNER and self._of_owner.total() < MAX_NESTED
        if (room and len(alike) < MAX_ALIKE) or asked(process):
            self.found[process.owner, process.inside].append(process)
            self._of_owner[process.owner] += 1


class HostPids:
    """Shared by the collectors of an agent; any thread may ask. ``proc`` is procfs.

    What is not there by its own number is searched for once: a process that a file names has begun before. A search
    takes looks of ``look_s``, and until it has ended the answer is that the process is gone.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        *,
        clock: Callable[[], float] = time.monotonic,
        look_s: float = LOOK_S,
    ) -> None:
        self._proc, self._clock, self._look_s = proc, clock, look_s
        self._known: dict[Hashable, _Process | None] = {}
        self._asked: dict[Hashable, int] = {}
        self._search: _Search | None = None
        self._last = _Search(0, iter(()))
        self._begun = 0
        self._looked = -math.inf
        self._of_root = False
        self._guard = threading.Lock()

    def find(self, owner: int, pid: int, start: int) -> int | None:
        """The number here of the process of user ``owner`` that has the number ``pid`` inside; None if it is gone."""
        if start_time(pid, self._proc) == start:
            return pid
        return self._look(owner, pid, (owner, pid, start), lambda one: one.start == start)

    def beside(self, owner: int, rank: int, inside: int) -> int | None:
        """The number here of the process with the number ``inside`` in the PID namespace of the process ``rank``."""
        if (namespace := self._namespace(rank)) is None:
            return None
        # Numbers are used again, so an answer is good for a minute.
        key = (owner, namespace, inside, self._clock() // RENEW_S)
        return self._look(owner, inside, key, lambda one: self._namespace(one.pid) == namespace)

    def _look(self, owner: int, inside: int, key: Hashable, fits: Callable[[_Process], bool]) -> int | None:
        with self._guard:
            if key not in self._known:
                found = self._first(owner, inside, fits)
                if found is None:
                    settled_by = self._asked.setdefault(key, self._begun + 1)
                    _forget_oldest(self._asked)
                    self._go_on(of_root=owner == 0)
                    found = self._first(owner, inside, fits)
                    if found is None and self._last.number < settled_by:
                        return None
                self._asked.pop(key, None)
                self._known[key] = found
                _forget_oldest(self._known)
            found = self._known[key]
        return found.pid if found is not None and self._lives(found) else None

    def _first(self, owner: int, inside: int, fits: Callable[[_Process], bool]) -> _Process | None:
        searches = (self._search, self._last) if self._search else (self._last,)
        alike = chain.from_iterable(search.found.get((owner, inside), ()) for search in searches)
        return next((one for one in alike if fits(one) and self._lives(one)), None)

    def _lives(self, process: _Process) -> bool:
        return start_time(process.pid, self._proc) == process.start

    def _go_on(self, *, of_root: bool) -> None:
        """Search for a moment, if the last time is long enough ago."""
        self._of_root |= of_root
        now = self._clock()
        if now - self._looked < SEARCH_S:
            return
        self._looked = now
        if (search := self._search) is None:
            self._begun += 1
            self._search = search = _Search(self._begun, self._processes(of_root=self._of_root))
            self._of_root = False
        for process in search.processes:
            if process is not None:
                search.keep(process, lambda one: (one.owner, one.inside, one.start) in self._asked)
            if self._clock() - now >= self._look_s:
                return
        self._search, self._last = None, search

    def _processes(self, *, of_root: bool) -> Iterator[_Process | None]:
        """The processes in nested PID namespaces, None for any other.

        Root's, most of a node's, are read only if they are asked for.
        """
        with os.scandir(self._proc) as entries:
            for entry in entries:
                yield self._nested(entry, of_root=of_root) if entry.name.isdecimal() else None

    def _nested(self, entry: os.DirEntry[str], *, of_root: bool) -> _Process | None:
        with contextlib.suppress(OSError, ValueError):  # ended meanwhile
            if not of_root and entry.stat().st_uid == 0:
                return None
            pid = int(entry.name)
            status = read_kernel_text(f"{self._proc}/{pid}/status")
            _, *inside = status.partition("\nNSpid:")[2].partition("\n")[0].split()
            if inside and (start := start_time(pid, self._proc)) is not None:
                owner = int(status.partition("\nUid:")[2].split(maxsplit=1)[0])
                return _Process(owner, pid, int(inside[-1]), start)
        return None

    def _namespace(self, pid: int) -> int | None:
        try:
            return (self._proc / str(pid) / "ns/pid").stat().st_ino
        except OSError:
            return None


def _forget_oldest(answers: dict[Hashable, _Process | None] | dict[Hashable, int]) -> None:
    if len(answers) > MAX_KNOWN:
        del answers[next(iter(answers))]
