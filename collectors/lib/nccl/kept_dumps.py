"""Flight recorder dumps of a run that wait to be judged, within the room that there is for those of all users."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from opsd.collectors.lib.nccl.flight_recorder import Dump, DumpError
from opsd.collectors.lib.shares import Room

CALL_BYTES: Final = 1_024
GROUP_BYTES: Final = 512
RANK_BYTES: Final = 40
"""What a call, a group and a member of a group take at most."""

Members = tuple[int, ...]


class KeptDumps:
    """Those of a run of ``owner`` by rank, each with its time. ``held`` is what they take. Used in one thread."""

    def __init__(self, owner: int, room: Room) -> None:
        self.owner, self.held = owner, 0
        self._room = room
        self.of_rank: dict[int, tuple[float, Dump]] = {}
        self._members: dict[Members, tuple[Members, int]] = {}
        """The members of groups, which dumps have in common, and how many have them."""

    def keep(self, rank: int, at: float, dump: Dump) -> None:
        """Keep ``dump`` in place of an earlier one of ``rank``. Raises DumpError."""
        self.forget(rank)
        new = {ranks for ranks in dump.members.values() if ranks not in self._members}
        if not self._room.take(self, _size(dump) + sum(map(_size_of_members, new))):
            raise DumpError("there is no room left for what it tells")
        members = {}
        for name, ranks in dump.members.items():
            members[name], users = self._members.get(ranks, (ranks, 0))
            self._members[members[name]] = members[name], users + 1
        self.of_rank[rank] = at, replace(dump, members=members)

    def forget(self, rank: int) -> None:
        """Give up the dump of ``rank``, if there is one."""
        _, dump = self.of_rank.pop(rank, (0.0, None))
        if dump is None:
            return
        self.held -= _size(dump)
        for ranks in dump.members.values():
            same, users = self._members.pop(ranks)
            if users > 1:
                self._members[same] = same, users - 1
            else:
                self.held -= _size_of_members(ranks)


def _size(dump: Dump) -> int:
    return len(dump.calls) * CALL_BYTES + (1 + len(dump.last) + len(dump.members)) * GROUP_BYTES


def _size_of_members(ranks: Members) -> int:
    return GROUP_BYTES + len(ranks) * RANK_BYTES
