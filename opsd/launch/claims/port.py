"""What a launcher asks of the group of launchers that a run has, and what it is told.

One of them, the head, leads: the maker of the newest claim in the run's folder. Heartbeats show who is there and carry
what the head and the others have to say; they decide nothing. Everything here is called from, and calls back in, the
launcher's loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from opsd.checkpoints.claims import Claim, End
from opsd.launch.claims.messages import Begun, Ready
from opsd.launch.claims.plan import Plan
from opsd.launch.io.protocol import Member

Body = dict[str, Any]
"""What the launchers tell each other through the group: anything that JSON can carry, at most 64 KiB encoded."""


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


class Group(Protocol):
    """This launcher's side."""

    @property
    def own(self) -> Member:
        """This launcher."""
        ...

    @property
    def head(self) -> str | None:
        """The name of the head within reach, None while there is none."""
        ...

    @property
    def plan(self) -> Plan | None:
        """The newest that is known."""
        ...

    @property
    def begun(self) -> bool:
        """Whether the ranks of the newest plan were started, as far as is known here."""
        ...

    @property
    def holds(self) -> bool:
        """Whether the newest claim is this launcher's."""
        ...

    @property
    def headless_s(self) -> float:
        """For how long nothing is heard of the last head."""
        ...

    @property
    def alive(self) -> Mapping[str, Member]:
        """(On the head.) The launchers that are being heard of, itself included."""
        ...

    @property
    def roster(self) -> Collection[str]:
        """The launchers that the head was last known to hear of."""
        ...

    @property
    def folder_silent_s(self) -> float:
        """For how many seconds the run's folder has not answered, or takes no claims."""
        ...

    @property
    def replacing(self) -> bool:
        """(On the head.) Whether a claim is wanted or under way that ends the ranks which run."""
        ...

    @property
    def folder_error(self) -> OSError | None:
        """Why the run's folder cannot be used, None while it answers, or has not answered yet."""
        ...

    def start(self, listener: Listener) -> None:
        """Begin to look for the others. Raises OSError if the port cannot be had."""
        ...

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> None:
        """(Head only.) Claim the next generation, with all that are alive as members; ``Listener.prepare`` follows.

        ``payload["keep"]`` is the generation whose ranks run on under this head, 0 if they are started anew. Replaces a
        proposal that is not claimed yet. Somebody else's claim ends this launcher's time as head.
        """
        ...

    def end(self, code: int, reason: str, lost: Sequence[str] = (), unfit: Sequence[str] = ()) -> None:
        """(Head only.) Claim the end of the run; ``Listener.over`` follows, on all launchers.

        Nodes that were ``lost``, or are ``unfit``, stand in the claim for whoever runs the job again.
        """
        ...

    def ready(self, number: int, answer: Ready) -> None:
        """This node has ended all ranks of generations before ``number``."""
        ...

    def tell_head(self, body: Body) -> None:
        """Send to the head; kept until one is there, and sent to the next one if it was not confirmed."""
        ...

    def tell_all(self, body: Body) -> None:
        """(Head only.) Send to every launcher that is alive, itself included."""
        ...

    def leave(self) -> None:
        """Say goodbye, so that nobody waits for this launcher's silence, and stop listening."""
        ...


class Folder(Protocol):
    """The claims in the run's folder. Nothing here waits; answers come by ``Core.looked`` and ``Core.claimed``.

    One look and one claim may be under way at a time.
    """

    def look(self, *, whole: bool) -> None:
        """Read the lease, and the newest claim if ``whole`` or if the lease names one that is not known."""
        ...

    def claim(self, claim: Claim) -> None:
        """Make a claim."""
        ...

    def renew(self, number: int, beat: int) -> None:
        """Renew the lease."""
        ...
