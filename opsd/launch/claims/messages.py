"""Messages between launchers, none of which decides anything, and the callbacks of the group."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from opsd.checkpoints.claims import End
from opsd.launch.claims.claim_store import Plan
from opsd.launch.io.protocol import Member, wire_name

Body = dict[str, Any]
"""A message carried by the group: JSON, at most 64 KiB encoded."""


@dataclass(frozen=True, slots=True)
class Ready:
    """No rank of an earlier generation runs here; the first node's ``port`` is the ranks' MASTER_PORT."""

    port: int
    furthest: int | None = None
    committed: int | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """All nodes are ready: the ranks' MASTER_ADDR and MASTER_PORT, and the highest completed and committed steps."""

    address: str
    port: int
    furthest: int | None = None
    committed: int | None = None


@dataclass(frozen=True, slots=True)
class Seek:
    """From a launcher without a leader: who is there?

    ``leader`` is the one that it hears from, if any; ``incarnation`` identifies its process.
    """

    direction: ClassVar[str] = "seeking launcher to others"
    number: int
    size: int
    leader: Member | None = field(default=None, metadata=wire_name("head"))
    fresh: bool = False
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class SeekReply:
    """The answer to ``seek``, with the same fields about the sender."""

    wire: ClassVar[str] = "near"
    direction: ClassVar[str] = "others to seeking launcher"
    number: int
    size: int
    leader: Member | None = field(default=None, metadata=wire_name("head"))
    fresh: bool = False
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """To the maker of the newest claim: the sender wants to follow it."""

    direction: ClassVar[str] = "member to leader"
    number: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """From the leader, several times a second: generation ``number`` is the newest, and whether it has begun."""

    wire: ClassVar[str] = "beat"
    direction: ClassVar[str] = "leader to member"
    number: int
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The answer to ``beat``: the generation that this launcher knows, and whether it is ready for it.

    It also confirms the last of the leader's broadcasts and member lists that have arrived.
    """

    wire: ClassVar[str] = "here"
    direction: ClassVar[str] = "member to leader"
    number: int
    size: int
    incarnation: str
    ready: Ready | None = None
    broadcasts: int = field(default=0, metadata=wire_name("orders"))
    members_version: int = field(default=0, metadata=wire_name("roster"))


@dataclass(frozen=True, slots=True)
class MemberList:
    """From the leader: the members, so that they find each other if the leader is lost."""

    wire: ClassVar[str] = "roster"
    direction: ClassVar[str] = "leader to members"
    number: int
    version: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class MemberChanges:
    """The same by what has changed since the claim of generation ``number``: of thousands, a few come or go at once.

    Who has not confirmed it, an earlier release for one, gets the list.
    """

    wire: ClassVar[str] = "changes"
    direction: ClassVar[str] = "leader to members"
    number: int
    version: int
    joined: tuple[Member, ...]
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Claimed:
    """From the leader: its claim ``number``, by what it changes in the plan of generation ``base``.

    0 is the plan with the expected launchers in all slots. Without ``places`` the ``slots`` are those of the base,
    without ``sizes`` a node has ``size`` ranks; ``mark`` is the digest of the plan. The leader ``listens`` at that IP
    address. See ``changes``.
    """

    direction: ClassVar[str] = "leader to members"
    number: int
    base: int
    launcher: str
    keeps: int
    mark: str
    slots: int
    places: dict[str, str]
    joined: tuple[Member, ...]
    left: tuple[str, ...]
    size: int
    sizes: dict[str, int]
    payload: Body
    listens: str = ""


@dataclass(frozen=True, slots=True)
class LeaderMail:
    """To the leader: message ``number``; those before ``oldest`` are confirmed. Sent again until it is confirmed."""

    wire: ClassVar[str] = "tell"
    direction: ClassVar[str] = "member to leader"
    number: int
    oldest: int
    body: Body


@dataclass(frozen=True, slots=True)
class LeaderMailAck:
    """From the leader: all mail up to ``number`` has arrived."""

    wire: ClassVar[str] = "told"
    direction: ClassVar[str] = "leader to member"
    number: int


@dataclass(frozen=True, slots=True)
class Broadcast:
    """From the leader to all, numbered like mail; ``here`` confirms it."""

    wire: ClassVar[str] = "order"
    direction: ClassVar[str] = "leader to members"
    number: int
    oldest: int
    body: Body


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender ends."""

    wire: ClassVar[str] = "bye"
    direction: ClassVar[str] = "any to all"


Message = (
    Seek
    | SeekReply
    | Join
    | Heartbeat
    | HeartbeatReply
    | MemberList
    | MemberChanges
    | Claimed
    | LeaderMail
    | LeaderMailAck
    | Broadcast
    | Leave
)
MESSAGES: tuple[type[Message], ...] = typing.get_args(Message)


class GroupListener(Protocol):
    """Callbacks of the group."""

    def enough(self, reachable: Mapping[str, Member]) -> bool:
        """Whether a generation could be formed of the ``reachable`` launchers, the own one among them."""

    def stuck(self) -> bool:
        """Whether the ranks of this node make no progress: ranks that do are not ended for a lost connection."""

    def leader_changed(self, leader: str | None) -> None:
        """``leader`` is the reachable leader from now on, None while there is none.

        If it is this launcher, it may call ``Group.propose``.
        """

    def prepare(self, plan: Plan) -> None:
        """``plan`` is claimed: end the ranks of earlier generations, then answer with ``Group.ready``.

        May be called again with a higher number before the first one has begun. Members without a slot are called too.
        """

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        """All nodes of ``plan`` are ready: start the ranks. None: the generation has begun without this process."""

    def cut_off(self) -> None:
        """Neither a leader nor the run's folder is reachable: the ranks here may have been superseded, end them."""

    def overtaken(self) -> None:
        """Another copy of the run has claimed its folder."""

    def over(self, end: End) -> None:
        """The run has ended."""

    def joined(self, member: Member) -> None:
        """(Leader only.) A launcher has come or come back."""

    def lost(self, name: str, silent_s: float) -> None:
        """(Leader only.) This launcher has exceeded its timeout."""

    def received(self, sender: str, body: Body) -> None:
        """A message: on the leader from a launcher (itself included), on all launchers from the leader."""
