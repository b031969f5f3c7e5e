"""One launcher's list of those that have come to a rendezvous, so that not each has to read the files of all others.

``launchers/roster/NUMBER.json.gz`` is rewritten with each beat by the launcher that made it. The highest number is in
use; the next one is made, exclusively, by a launcher for which the newest has not changed for ``SILENT_S``. Two authors
at once do no harm: the lists may differ, and the claims decide about the run.

All launchers read all of it at once, so it is short: names and addresses are hostlists.
"""

from __future__ import annotations

import gzip
import json
import os
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsd.launch.io.protocol import Member
from opsd.slurm.hostlist import HostlistError, compress_in_order, expand

FOLDER = "roster"
SILENT_S = 2.0
MAX_BYTES = 8 << 20
"""Of JSON: 10,000 launchers take a tenth of a million, or half a million if their names have no numbers."""


@dataclass(frozen=True, slots=True)
class Roster:
    """How many launchers are present, and who they are once they are enough; ``beat`` changes with every write."""

    beat: int
    count: int
    members: tuple[Member, ...] | None

    @classmethod
    def read(cls, path: Path) -> Roster | None:
        """The content of ``path``, None if it is not usable."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                raw: Any = json.loads(gzip.GzipFile(fileobj=file).read(MAX_BYTES))
            members = raw["members"]
            listed = None if members is None else _members(members)
            return cls(int(raw["beat"]), int(raw["count"]), listed)
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
            return None


class SharedRoster:
    """The roster below ``folder`` as one launcher sees it; raises OSError if the files cannot be used."""

    def __init__(self, folder: Path, own: Member) -> None:
        self.newest: Roster | None = None
        """The text that another launcher has written since this one first looked."""
        self._folder = folder / FOLDER
        self._own = own
        self._number = 0
        self._content: dict[str, Any] = {}
        self._seen: tuple[int, int] | None = None
        self._changed_at = 0.0

    def is_author(self, now: float) -> bool:
        """Look into the folder; True if this launcher is to read the others' files, and to ``write``."""
        numbers = (path.name.partition(".")[0] for path in self._folder.iterdir())
        number = max((int(each) for each in numbers if each.isdecimal()), default=0)
        if number == self._number != 0:
            return True
        self._number = 0
        roster = Roster.read(self._path(number)) if number else None
        seen = number, roster.beat if roster is not None else 0
        if seen == self._seen:
            return now - self._changed_at >= SILENT_S and self._take(number + 1)
        first = self._seen is None
        self._seen, self._changed_at = seen, now
        if first:  # a roster may be left over from an earlier start
            return number == 0 and self._take(1)
        if roster is not None and not self._is_of_this_start(roster):
            return self._take(number + 1)
        self.newest = roster
        return False

    def write(self, count: int, members: Sequence[Member] | None) -> None:
        """``count`` launchers are present; ``members`` if they are enough."""
        self._content = {"count": count, "members": None if members is None else _columns(members)}
        self.beat()

    def beat(self) -> None:
        """Write it once more."""
        draft = self._folder / f".{self._own.name}.{os.getpid()}.roster"
        draft.write_bytes(gzip.compress(json.dumps({**self._content, "beat": time.time_ns()}).encode()))
        draft.replace(self._path(self._number))

    def _is_of_this_start(self, roster: Roster) -> bool:
        """Whether it does not list an earlier launcher of this node, which still runs."""
        return all(member == self._own for member in roster.members or () if member.name == self._own.name)

    def _take(self, number: int) -> bool:
        try:
            os.close(os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        self._number = number
        return True

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json.gz"


def _columns(members: Sequence[Member]) -> dict[str, Any]:
    return {
        "names": _hostlist([member.name for member in members]),
        "addresses": _hostlist([member.address for member in members]),
        "ports": [member.port for member in members],
    }


def _members(raw: Any) -> tuple[Member, ...]:
    """The opposite. Raises KeyError, TypeError or ValueError."""
    columns = _texts(raw["names"]), _texts(raw["addresses"]), map(int, raw["ports"])
    return tuple(Member(*row) for row in zip(*columns, strict=True))


def _hostlist(texts: list[str]) -> str | list[str]:
    """``texts`` as a hostlist, or as they are if one of them, such as an address that a user gave, fits into none."""
    hostlist = compress_in_order(texts)
    try:
        return hostlist if list(expand(hostlist)) == texts else texts
    except HostlistError:
        return texts


def _texts(raw: Any) -> Iterable[str]:
    return expand(raw) if isinstance(raw, str) else map(str, raw)
