"""One launcher's list of those that have come to a rendezvous, so that not each has to read the files of all others.

``launchers/roster/NUMBER.json`` is rewritten with each beat by the launcher that made it. The highest number is in use;
the next one is made, exclusively, by a launcher for which the newest has not changed for ``SILENT_S``. Two authors at
once do no harm: the lists may differ, and the claims decide about the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsd.launch.io.protocol import Member, member_from_json, member_to_json

FOLDER = "roster"
SILENT_S = 2.0
MAX_BYTES = 8 << 20
"""10,000 launchers take about half a million."""


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
                raw: Any = json.loads(file.read(MAX_BYTES))
            members = raw["members"]
            listed = None if members is None else tuple(map(member_from_json, members))
            return cls(int(raw["beat"]), int(raw["count"]), listed)
        except (OSError, ValueError, KeyError, TypeError):
            return None


class SharedRoster:
    """The roster below ``folder`` as one launcher sees it; raises OSError if the files cannot be used."""

    def __init__(self, folder: Path, own: Member) -> None:
        self.newest: Roster | None = None
        """What another launcher has written since this one first looked."""
        self._folder = folder / FOLDER
        self._own = own
        self._number = 0
        self._content: dict[str, Any] = {}
        self._seen: tuple[int, int] | None = None
        self._changed_at = 0.0

    def is_author(self, now: float) -> bool:
        """Look into the folder; True if this launcher is to read the others' files, and to ``write``."""
        number = max((int(path.stem) for path in self._folder.iterdir() if path.stem.isdecimal()), default=0)
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
        listed = None if members is None else [member_to_json(member) for member in members]
        self._content = {"count": count, "members": listed}
        self.beat()

    def beat(self) -> None:
        """Write it once more."""
        draft = self._folder / f".{self._own.name}.{os.getpid()}.roster"
        draft.write_text(json.dumps({**self._content, "beat": time.time_ns()}) + "\n", encoding="utf-8")
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
        return self._folder / f"{number}.json"
