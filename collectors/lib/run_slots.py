"""Which run folders are looked at. Any user may make folders below the root in shared memory, as many as memory holds.

The root is read a part at a time, and of each owner only so many folders are remembered. Of these some have a slot:
those that live before those that have ended, users of a GPU before others, and as many for each owner.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Final, NamedTuple

from opsd.collectors.lib.run_files import RUN_NAME
from opsd.inodes import Inode, look

MAX_RUNS: Final = 64
"""Runs looked at on one node."""
MAX_PER_OWNER: Final = 64
"""Folders remembered of one owner: those that live, then the newest."""
MAX_OWNERS: Final = 64
SCAN_ENTRIES: Final = 20_000
SCAN_S: Final = 0.02
"""Entries of the root, and seconds, that one look reads at most; the next goes on there."""
JUDGED: Final = 32
"""Folders without a slot that one look judges, in turn."""
SAMPLED: Final = 8
"""Folders beyond ``MAX_PER_OWNER`` that are judged in each reading of the root, drawn by chance."""
_SCAN_STEP: Final = 64

Lives = Callable[[Path, int], bool]
"""Whether the run in this folder of this user lives."""


class Chosen(NamedTuple):
    """A folder with a slot."""

    folder: Path
    owner: int


class _Candidate:
    """A run folder. ``lives`` is None until it has been judged."""

    __slots__ = ("judged", "lives", "modified", "name", "scan")

    def __init__(self, name: str) -> None:
        self.name = name
        self.lives: bool | None = None
        self.modified = self.judged = 0.0
        self.scan = 0


class _Owner:
    """The folders remembered of a user, and how many more the last and this reading of the root have met."""

    def __init__(self) -> None:
        self.folders: dict[str, _Candidate] = {}
        self.more = self.more_now = 0

    @property
    def lives(self) -> bool:
        return any(candidate.lives for candidate in self.folders.values())


class RunSlots:
    """The folders below ``root`` that are looked at. Any thread may look.

    ``left_out`` is how many that live, or were not judged yet, are not. ``first`` are the users to prefer.
    """

    def __init__(
        self,
        root: Path,
        lives: Lives,
        *,
        first: Callable[[], frozenset[int]] = frozenset,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._lives, self.first_users, self._clock = root, lives, first, clock
        self._owners: dict[int, _Owner] = {}
        self._entries: Iterator[os.DirEntry[str]] | None = None
        self._mount: tuple[int, int] | None = None
        self._scan = 0
        self._first = frozenset[int]()
        self._held = frozenset[str]()
        self._guard = threading.Lock()
        self._chosen: tuple[Chosen, ...] = ()
        self._looked = -math.inf
        self.left_out = 0

    def look(self, *, within_s: float = 0.0) -> tuple[Chosen, ...]:
        """The folders to read now, by name; those of an earlier look if that was less than ``within_s`` ago.

        Raises OSError if the root cannot be read.
        """
        with self._guard:
            if self._clock() - self._looked >= within_s:
                self._chosen, self._looked = self._look(), self._clock()
            return self._chosen

    def _look(self) -> tuple[Chosen, ...]:
        crowded = sum(len(own.folders) for own in self._owners.values()) > MAX_RUNS
        self._first = self.first_users() if crowded else frozenset()
        self._read_root()
        if crowded:
            self._judge()
        chosen = self._choose()
        self._held = frozenset(candidate.name for _, candidate in chosen)
        remembered = (candidate for own in self._owners.values() for candidate in own.folders.values())
        self.left_out = sum(c.lives is not False for c in remembered if c.name not in self._held)
        return tuple(sorted(Chosen(self._root / candidate.name, owner) for owner, candidate in chosen))

    def _read_root(self) -> None:
        """Read on in the root, from its start if its end was reached."""
        if self._entries is None:
            self._entries, self._mount = os.scandir(self._root), look(self._root).mount
            self._scan += 1
        until, left = self._clock() + SCAN_S, SCAN_ENTRIES
        while left > 0 and self._clock() < until:
            part = list(islice(self._entries, _SCAN_STEP))
            for entry in part:
                if RUN_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(OSError):  # removed meanwhile
                        self._remember(entry.name, look(entry.path, follow=False))
            left -= len(part)
            if len(part) < _SCAN_STEP:
                self._end_scan()
                return

    def _end_scan(self) -> None:
        """Forget the folders that this reading of the root has not met."""
        self._entries = None
        for owner, own in list(self._owners.items()):
            own.folders = {name: c for name, c in own.folders.items() if c.scan == self._scan}
            own.more, own.more_now = own.more_now, 0
            if not own.folders:
                del self._owners[owner]

    def _remember(self, name: str, info: Inode) -> None:
        if info.mount != self._mount:  # what is mounted over it may never answer
            return
        own = self._owners.get(info.user)
        if own is None:
            if len(self._owners) >= MAX_OWNERS and not self._forget_owner(info.user):
                return
            own = self._owners[info.user] = _Owner()
        candidate = own.folders.get(name) or self._admit(own, info.user, name, info.modified)
        if candidate is not None:
            candidate.modified, candidate.scan = info.modified, self._scan

    def _admit(self, own: _Owner, owner: int, name: str, modified: float) -> _Candidate | None:
        """A place for a new folder, None if it has to be left out: among many some are judged, by chance."""
        new = _Candidate(name)
        if len(own.folders) >= MAX_PER_OWNER:
            own.more_now += 1
            drawn = random.random() * max(own.more, own.more_now) < SAMPLED  # a sample, no secret
            new.lives = self._lives(self._root / name, owner) if drawn else None
            last = min(own.folders.values(), key=lambda c: (self._may_live(c), c.name in self._held, c.modified))
            if (self._may_live(new), modified) <= (self._may_live(last), last.modified):
                return None
            del own.folders[last.name]
        own.folders[name] = new
        return new

    def _forget_owner(self, other: int) -> bool:
        """Make room for another owner; of those remembered, one of whom nothing lives, or who is not preferred."""
        for owner, own in self._owners.items():
            if not own.lives or (other in self._first and owner not in self._first):
                del self._owners[owner]
                return True
        return False

    def _judge(self) -> None:
        """Find out of some folders whether they live: of each owner in turn the one judged longest ago."""
        turns = [
            (turn, candidate.judged, owner, candidate)
            for owner, own in self._owners.items()
            for turn, candidate in enumerate(sorted(own.folders.values(), key=lambda c: (c.judged, -c.modified)))
        ]
        for _, _, owner, candidate in sorted(turns, key=lambda turn: turn[:3])[:JUDGED]:
            candidate.lives = self._lives(self._root / candidate.name, owner)
            candidate.judged = self._clock()

    def _choose(self) -> list[tuple[int, _Candidate]]:
        """The folders with a slot. In each round every owner gets one, as long as there are any."""
        owners = sorted(self._owners.items(), key=lambda item: (item[0] not in self._first, item[0]))
        chosen: list[tuple[int, _Candidate]] = []
        for wanted in (True, None, False):
            queues = [
                [
                    (owner, c)
                    for c in sorted(own.folders.values(), key=self._order)
                    if (self._may_live(c) or c.lives) is wanted
                ]
                for owner, own in owners
            ]
            chosen += [one for turn in zip_longest(*queues) for one in turn if one is not None]
        return chosen[:MAX_RUNS]

    def _may_live(self, candidate: _Candidate) -> bool:
        """A run that has a slot and is not judged yet keeps the slot until it is."""
        return bool(candidate.lives) or (candidate.lives is None and candidate.name in self._held)

    def _order(self, candidate: _Candidate) -> tuple[bool, float, str]:
        """Within one owner: what has a slot keeps it, then the newest."""
        return candidate.name not in self._held, -candidate.modified, candidate.name
