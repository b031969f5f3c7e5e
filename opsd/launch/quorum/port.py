"""What a launcher asks of the agreement with its fellows, and what it is told.

The launchers of a run watch each other, elect a head among themselves, and agree on numbered generations. A generation
becomes valid only with the consent of more than half of the launchers of the one before (``Plan.members``), so of two
sides of a broken network at most one goes on. Everything here is called from, and calls back in, the launcher's loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from opsd.launch.io.member import Member, Message


@dataclass(frozen=True, slots=True)
class Plan:
    """A generation: its ``number``, unique over the life of the run, and who does what in it.

    ``slots`` are the nodes that run ranks, by node rank. ``members`` are all launchers that vote on the next plan:
    those of ``slots`` and the spares. ``payload`` is the head's to fill.
    """

    number: int
    slots: tuple[str, ...]
    members: tuple[Member, ...]
    payload: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spares(self) -> tuple[str, ...]:
        """The members that run no ranks."""
        return tuple(member.name for member in self.members if member.name not in self.slots)


class Listener(Protocol):
    """What a launcher does with what it is told."""

    def head_changed(self, head: str | None) -> None:
        """``head`` is the head from now on; None while there is none within reach."""
        ...

    def prepare(self, plan: Plan) -> None:
        """``plan`` is proposed: end the ranks of earlier generations, then answer with ``Quorum.ready``.

        May come again with a higher number before the first one has begun. For members without a slot too.
        """
        ...

    def begin(self, plan: Plan, answers: Mapping[str, Message]) -> None:
        """``plan`` is valid: every member is ready; ``answers`` are what each has passed to ``Quorum.ready``."""
        ...

    def isolated(self) -> None:
        """Fewer than half of the members are within reach: what this node runs may no longer be valid, end it now."""
        ...

    def tied(self, absent: tuple[str, ...]) -> None:
        """Exactly half of the members are within reach. ``Quorum.decide_tie`` says whether this half may go on.

        Asked of the launcher that would be head; until it is answered the half waits.
        """
        ...

    def joined(self, member: Member) -> None:
        """(On the head.) A launcher with the secret has come or come back; it votes once it is in a plan."""
        ...

    def lost(self, name: str, silent_s: float) -> None:
        """(On the head.) Nothing has been heard of this launcher for longer than a living one would be silent."""
        ...

    def received(self, sender: str, message: Message) -> None:
        """A message: on the head from a launcher (itself included), on all launchers from the head."""
        ...


class Quorum(Protocol):
    """This launcher's side of the agreement."""

    @property
    def own(self) -> Member:
        """This launcher."""
        ...

    @property
    def head(self) -> str | None:
        """The name of the head, None while there is none."""
        ...

    @property
    def plan(self) -> Plan | None:
        """The newest plan that is known to be valid."""
        ...

    @property
    def alive(self) -> Mapping[str, Member]:
        """(On the head.) The launchers that are being heard of, itself included, those in no plan too."""
        ...

    def start(self, listener: Listener) -> None:
        """Begin to listen and to look for the others. Raises OSError if the port cannot be had."""
        ...

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> int:
        """(Head only.) Propose the next generation with all that are alive as members; returns its number.

        Replaces a proposal on its way. A member that is lost before it is ready is told by ``Listener.lost``, and the
        proposal then waits to be replaced.
        """
        ...

    def ready(self, number: int, answer: Message) -> None:
        """This node has ended all ranks of generations before ``number``."""
        ...

    def tell_head(self, message: Message) -> None:
        """Send to the head; kept until one is there. Sent again if the head changes before it has confirmed."""
        ...

    def tell_all(self, message: Message) -> None:
        """(Head only.) Send to every launcher that is alive, itself included."""
        ...

    def decide_tie(self, go_on: bool) -> None:
        """Answer to ``Listener.tied``."""
        ...

    def leave(self) -> None:
        """Say goodbye, so that nobody waits for this launcher's silence, and stop listening."""
        ...
