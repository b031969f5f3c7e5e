"""What a generation runs, as its claim carries it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from opsd.launch.io.protocol import Member, member_from_json, member_to_json


@dataclass(frozen=True, slots=True)
class Plan:
    """Generation ``number``: who leads it, and who does what in it.

    ``slots`` are the nodes that run ranks, by node rank; without any the run waits for nodes. ``members`` are the
    launchers that were there, spares included, and ``sizes`` how many ranks each node has. ``payload`` is what the head
    leaves to its successors; ``keep`` in it is the generation whose ranks run on, 0 if they are started anew.
    """

    number: int
    head: str
    slots: tuple[str, ...]
    members: tuple[Member, ...]
    sizes: Mapping[str, int]
    payload: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        """The generation of ranks that runs under this plan: its own, or the one that it keeps running."""
        return int(self.payload.get("keep", 0)) or self.number

    @property
    def spares(self) -> tuple[str, ...]:
        """The members that run no ranks."""
        return tuple(member.name for member in self.members if member.name not in self.slots)

    def member(self, name: str) -> Member | None:
        """The launcher ``name``, None if it was not there."""
        return next((member for member in self.members if member.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """As it stands in a claim."""
        return {
            "head": self.head,
            "slots": list(self.slots),
            "members": [member_to_json(member) for member in self.members],
            "sizes": dict(self.sizes),
            "payload": dict(self.payload),
        }

    @classmethod
    def from_json(cls, number: int, raw: Mapping[str, Any]) -> Self:
        """The plan in a claim. Raises KeyError, TypeError or ValueError for what is none."""
        slots, payload = tuple(map(str, raw["slots"])), raw["payload"]
        members = tuple(member_from_json(member) for member in raw["members"])
        sizes = {str(name): int(size) for name, size in raw["sizes"].items()}
        if not isinstance(payload, dict) or not set(slots) <= {member.name for member in members} & sizes.keys():
            raise ValueError(raw)
        return cls(number, str(raw["head"]), slots, members, sizes, payload)
