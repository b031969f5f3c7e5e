"""The group over TCP, in the launcher's loop; a launcher that is alone in it has no network."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from opsd.launch.claims.core import TIMEOUT_S, Core
from opsd.launch.claims.folder import RunFolder
from opsd.launch.claims.messages import MESSAGES, Message, Ready
from opsd.launch.claims.plan import Plan
from opsd.launch.claims.port import Body, Listener
from opsd.launch.io.handshake import Identity
from opsd.launch.io.loop import Loop
from opsd.launch.io.protocol import Codec, Member
from opsd.launch.io.reporting import say as say_to_user
from opsd.launch.io.strangers import ask_for_descriptors
from opsd.launch.io.transport import Transport

TICK_S = 0.05
ALONE_TICK_S = 0.25
FEW = 64
"""With more launchers than this, ticks are twice as long."""
_CODEC = Codec(MESSAGES)


class TcpGroup:
    """The ``Group`` of a launcher, the process ``launcher``, whose node runs ``size`` ranks.

    ``expected`` are the launchers of the run, the own one included. ``start`` is what those of one start of it have in
    common. A launcher that is not among those of the others comes later.
    """

    def __init__(
        self,
        own: Member,
        expected: Sequence[Member],
        folder: Path,
        loop: Loop,
        *,
        start: str,
        launcher: str,
        secret: bytes,
        size: int,
        timeout_s: float = TIMEOUT_S,
        say: Callable[[str], None] = say_to_user,
    ) -> None:
        self._loop = loop
        self._left = False
        self._alone = len(expected) == 1
        self._transport = Transport(
            Identity(own, start, secret), loop,
            received=self._receive, unreachable=self._lose, say=say, launchers=lambda: len(self._core.roster),
        )  # fmt: skip
        self._sent: tuple[Message | None, dict[str, Any]] = (None, {})
        self._folder = RunFolder(
            folder, loop,
            lambda found: self._unless_left(lambda now: self._core.looked(now, found)),
            lambda mine: self._unless_left(lambda now: self._core.claimed(now, mine)),
            say,
        )  # fmt: skip
        self._core = Core(
            own, expected, self._send, self._folder, size=size, start=start, launcher=launcher, timeout_s=timeout_s,
            now=time.monotonic(),
        )  # fmt: skip

    @property
    def own(self) -> Member:
        """This launcher."""
        return self._core.own

    @property
    def head(self) -> str | None:
        """The name of the head within reach, None while there is none."""
        return self._core.head

    @property
    def plan(self) -> Plan | None:
        """The newest that is known."""
        return self._core.plan

    @property
    def begun(self) -> bool:
        """Whether the ranks of the newest plan were started, as far as is known here."""
        return self._core.begun

    @property
    def holds(self) -> bool:
        """Whether the newest claim is this launcher's."""
        return self._core.holds

    @property
    def headless_s(self) -> float:
        """For how long nothing is heard of the last head."""
        return self._core.headless_s

    @property
    def alive(self) -> Mapping[str, Member]:
        """(On the head.) The launchers that are being heard of."""
        return self._core.alive

    @property
    def roster(self) -> Collection[str]:
        """The launchers that the head was last known to hear of."""
        return self._core.roster.keys()

    @property
    def folder_silent_s(self) -> float:
        """For how many seconds the run's folder has not answered, or takes no claims."""
        since = self._folder.failing_since
        return time.monotonic() - min(self._core.looked_at, since if since is not None else self._core.looked_at)

    @property
    def replacing(self) -> bool:
        """(On the head.) Whether a claim is wanted or under way that ends the ranks which run."""
        return self._core.replacing

    @property
    def folder_error(self) -> OSError | None:
        """Why the run's folder cannot be used, None while it answers, or has not answered yet."""
        return self._folder.error

    def start(self, listener: Listener) -> None:
        """Listen and look for the others. Raises OSError if the port cannot be had."""
        self._core.start(listener)
        if not self._alone:
            ask_for_descriptors(len(self._core.roster))
            self._transport.listen()
        self._loop.every(self._tick_s, self._tick)
        self._tick()

    @property
    def _tick_s(self) -> float:
        few = len(self._core.roster) <= FEW
        return ALONE_TICK_S if self._alone else TICK_S if few else 2 * TICK_S

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> None:
        """See ``Group.propose``."""
        self._core.propose(slots, payload)
        self._flush_soon()

    def end(self, code: int, reason: str, lost: Sequence[str] = (), unfit: Sequence[str] = ()) -> None:
        """See ``Group.end``."""
        self._core.end(code, reason, lost, unfit)
        self._flush_soon()

    def ready(self, number: int, answer: Ready) -> None:
        """See ``Group.ready``."""
        self._core.ready(number, answer)
        self._flush_soon()

    def tell_head(self, body: Body) -> None:
        """See ``Group.tell_head``."""
        self._core.tell_head(body)
        self._flush_soon()

    def tell_all(self, body: Body) -> None:
        """See ``Group.tell_all``."""
        self._core.tell_all(body)
        self._flush_soon()

    def leave(self) -> None:
        """Say goodbye and stop listening."""
        if not self._left:
            self._left = True
            self._core.leave()
            self._transport.close()

    def _send(self, member: Member, message: Message) -> None:
        """What is said to many is encoded once."""
        if self._sent[0] is not message:
            self._sent = (message, _CODEC.encode(message))
        self._transport.send(member, self._sent[1])

    def _flush_soon(self) -> None:
        self._loop.later(0.0, self._core.flush)

    def _tick(self) -> None:
        self._unless_left(self._core.tick)

    def _unless_left(self, call: Callable[[float], None]) -> None:
        if not self._left:
            call(time.monotonic())

    def _lose(self, name: str) -> None:
        self._unless_left(lambda now: self._core.unreachable(now, name))

    def _receive(self, sender: Member, raw: dict[str, Any]) -> None:
        message = _CODEC.decode(raw)
        self._unless_left(lambda now: self._core.receive(now, sender, message))
