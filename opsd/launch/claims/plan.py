"""What a generation runs, as its claim carries it, and what a launcher has to do about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from opsd.checkpoints.claims import End
from opsd.launch.claims.messages import Begun, Body
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


class Listener(Protocol):
    """What a launcher does with what it is told."""

    def enough(self, near: Collection[str]) -> bool:
        """Whether a generation could be formed of the nodes ``near``, the own one among them."""
        ...

    def stuck(self) -> bool:
        """Whether the ranks of this node make no progress: nobody ends ranks that do for being alone."""
        ...

    def head_changed(self, head: str | None) -> None:
        """``head`` is the head within reach from now on, None while there is none.

        If it is this launcher itself: it may make plans, with ``Group.propose``.
        """
        ...

    def prepare(self, plan: Plan) -> None:
        """``plan`` is claimed: end the ranks of earlier generations, then answer with ``Group.ready``.

        May come again with a higher number before the first one has begun. For members without a slot too.
        """
        ...

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        """All nodes of ``plan`` are ready: start the ranks. None: it has begun without this process, see what to do."""
        ...

    def cut_off(self) -> None:
        """Neither a head nor the run's folder is within reach: what runs here may have been passed over, end it."""
        ...

    def overtaken(self) -> None:
        """Another copy of the run has claimed its folder."""
        ...

    def over(self, end: End) -> None:
        """The run has ended."""
        ...

    def joined(self, member: Member) -> None:
        """(On the head.) A launcher has come or come back."""
        ...

    def lost(self, name: str, silent_s: float) -> None:
        """(On the head.) Nothing has been heard of this launcher for longer than a living one would be silent."""
        ...

    def received(self, sender: str, body: Body) -> None:
        """A message: on the head from a launcher (itself included), on all launchers from the head."""
        ...
