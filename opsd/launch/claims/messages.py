"""What launchers say to each other to know who is there. None of it decides anything: claims do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from opsd.launch.io.protocol import Member

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
    """From a launcher without a head, to others: who is there?

    ``head`` is the one that it hears of, if any, ``incarnation`` names its process.
    """

    direction: ClassVar[str] = "seeking launcher to others"

    number: int
    size: int
    head: Member | None = None
    fresh: bool = False
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Near:
    """The answer to ``Seek``, with the same said of oneself."""

    direction: ClassVar[str] = "others to seeking launcher"

    number: int
    size: int
    head: Member | None = None
    fresh: bool = False
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    """To the head of the newest claim: here is somebody to lead."""

    direction: ClassVar[str] = "member to head"

    number: int


@dataclass(frozen=True, slots=True)
class Beat:
    """From the head, some times a second: generation ``number`` is the newest, and whether it has begun."""

    direction: ClassVar[str] = "head to member"

    number: int
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class Here:
    """The answer to ``Beat``: the generation that this launcher knows, and whether it is ready for it.

    ``orders`` and ``roster`` are what it has heard last of the head's numbered orders and lists.
    """

    direction: ClassVar[str] = "member to head"

    number: int
    size: int
    incarnation: str
    ready: Ready | None = None
    orders: int = 0
    roster: int = 0


@dataclass(frozen=True, slots=True)
class Roster:
    """From the head: who is there, so that anybody can find the others should it be gone."""

    direction: ClassVar[str] = "head to members"

    number: int
    version: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """To the head: message ``number``; those before ``oldest`` were heard. Sent again until it is confirmed."""

    direction: ClassVar[str] = "member to head"

    number: int
    oldest: int
    body: Body


@dataclass(frozen=True, slots=True)
class Told:
    """From the head: everything up to message ``number`` was heard."""

    direction: ClassVar[str] = "head to member"

    number: int


@dataclass(frozen=True, slots=True)
class Order:
    """From the head, the same way; ``Here`` confirms it."""

    direction: ClassVar[str] = "head to members"

    number: int
    oldest: int
    body: Body


@dataclass(frozen=True, slots=True)
class Bye:
    """This launcher ends."""

    direction: ClassVar[str] = "any to all"


Message = Seek | Near | Join | Beat | Here | Roster | Tell | Told | Order | Bye
MESSAGES: tuple[type[Message], ...] = (Seek, Near, Join, Beat, Here, Roster, Tell, Told, Order, Bye)
