"""What launchers say to each other, none of which decides anything, and what the launcher around the group is told."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from opsd.checkpoints.claims import End
from opsd.launch.claims.authority import Plan
from opsd.launch.io.protocol import Member, wire_name

Body = dict[str, Any]
"""What the launchers tell each other through the group: anything that JSON can carry, at most 64 KiB encoded."""


@dataclass(frozen=True, slots=True)
class Ready:
    """No rank of an earlier generation runs here; the first node's ``port`` is where the ranks will meet."""

    port: int
    furthest: int | None = None
    committed: int | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """All nodes are ready: where the ranks meet, and the highest completed and committed steps that anybody knows."""

    address: str
    port: int
    furthest: int | None = None
    committed: int | None = None


@dataclass(frozen=True, slots=True)
class Seek:
    """From a launcher without a leader, to others: who is there?

    ``leader`` is the one that it hears of, if any, ``incarnation`` names its process.
    """

    direction: ClassVar[str] = "seeking launcher to others"
    number: int
    size: int
    leader: Member | None = field(default=None, metadata=wire_name("head"))
    fresh: bool = False
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Near:
    """The answer to ``Seek``, with the same said of oneself."""

    direction: ClassVar[str] = "others to seeking launcher"
    number: int
    size: int
    leader: Member | None = field(default=None, metadata=wire_name("head"))
    fresh: bool = False
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """To the leader of the newest claim: here is somebody to lead."""

    direction: ClassVar[str] = "member to leader"
    number: int


@dataclass(frozen=True, slots=True)
class Beat:
    """From the leader, some times a second: generation ``number`` is the newest, and whether it has begun."""

    direction: ClassVar[str] = "leader to member"
    number: int
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class Here:
    """The answer to ``Beat``: the generation that this launcher knows, and whether it is ready for it.

    ``orders`` and ``roster`` are what it has heard last of the leader's numbered orders and lists.
    """

    direction: ClassVar[str] = "member to leader"
    number: int
    size: int
    incarnation: str
    ready: Ready | None = None
    orders: int = 0
    roster: int = 0


@dataclass(frozen=True, slots=True)
class Roster:
    """From the leader: who is there, so that anybody can find the others should it be gone."""

    direction: ClassVar[str] = "leader to members"
    number: int
    version: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """To the leader: message ``number``; those before ``oldest`` were heard. Sent again until it is confirmed."""

    direction: ClassVar[str] = "member to leader"
    number: int
    oldest: int
    body: Body


@dataclass(frozen=True, slots=True)
class Told:
    """From the leader: everything up to message ``number`` was heard."""

    direction: ClassVar[str] = "leader to member"
    number: int


@dataclass(frozen=True, slots=True)
class Order:
    """From the leader, the same way; ``Here`` confirms it."""

    direction: ClassVar[str] = "leader to members"
    number: int
    oldest: int
    body: Body


@dataclass(frozen=True, slots=True)
class Bye:
    """This launcher ends."""

    direction: ClassVar[str] = "any to all"


Message = Seek | Near | Join | Beat | Here | Roster | Tell | Told | Order | Bye
MESSAGES: tuple[type[Message], ...] = (Seek, Near, Join, Beat, Here, Roster, Tell, Told, Order, Bye)


class Listener(Protocol):
    """What a launcher does with what it is told."""

    def enough(self, near: Collection[str]) -> bool:
        """Whether a generation could be formed of the nodes ``near``, the own one among them."""

    def stuck(self) -> bool:
        """Whether the ranks of this node make no progress: nobody ends ranks that do for being alone."""

    def leader_changed(self, leader: str | None) -> None:
        """``leader`` is the leader within reach from now on, None while there is none.

        If it is this launcher itself: it may make plans, with ``Group.propose``.
        """

    def prepare(self, plan: Plan) -> None:
        """``plan`` is claimed: end the ranks of earlier generations, then answer with ``Group.ready``.

        May come again with a higher number before the first one has begun. For members without a slot too.
        """

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        """All nodes of ``plan`` are ready: start the ranks. None: it has begun without this process, see what to do."""

    def cut_off(self) -> None:
        """Neither a leader nor the run's folder is within reach: what runs here may have been passed over, end it."""

    def overtaken(self) -> None:
        """Another copy of the run has claimed its folder."""

    def over(self, end: End) -> None:
        """The run has ended."""

    def joined(self, member: Member) -> None:
        """(On the leader.) A launcher has come or come back."""

    def lost(self, name: str, silent_s: float) -> None:
        """(On the leader.) Nothing has been heard of this launcher for longer than a living one would be silent."""

    def received(self, sender: str, body: Body) -> None:
        """A message: on the leader from a launcher (itself included), on all launchers from the leader."""
