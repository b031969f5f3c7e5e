"""The agreement over TCP, in the launcher's loop."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opsd.launch.io.connection import Identity
from opsd.launch.io.loop import Loop
from opsd.launch.io.member import Member, Message
from opsd.launch.io.messages import say as say_to_user
from opsd.launch.io.transport import Transport
from opsd.launch.quorum.core import Core
from opsd.launch.quorum.port import Listener, Plan
from opsd.launch.quorum.reach import TIMEOUT_S

TICK_S = 0.05
FEW = 64
"""With more launchers than this, ticks are twice as long."""
OTHER_FILES = 512


class TcpQuorum:
    """The ``Quorum`` of a launcher.

    ``initial`` are the launchers of the job, the own one included; more than half of them must come before anything
    begins. A launcher that is not among those of the others comes later, and asks them where the head is.
    """

    def __init__(
        self,
        own: Member,
        initial: Sequence[Member],
        *,
        run: str,
        secret: bytes,
        loop: Loop,
        first_number: int = 1,
        timeout_s: float = TIMEOUT_S,
        say: Callable[[str], None] = say_to_user,
    ) -> None:
        self._loop = loop
        self._say = say
        self._left = False
        self._transport = Transport(
            Identity(own, run, secret), loop, received=self._receive, unreachable=self._lose, say=say
        )
        self._core = Core(
            own,
            initial,
            self._transport.send,
            first_number=first_number,
            first_message=time.time_ns() // 1_000_000,
            timeout_s=timeout_s,
            now=time.monotonic(),
        )

    @property
    def own(self) -> Member:
        """This launcher."""
        return self._core.own

    @property
    def head(self) -> str | None:
        """The name of the head, None while there is none."""
        return self._core.head

    @property
    def plan(self) -> Plan | None:
        """The newest plan that is known to be valid."""
        return self._core.plan

    @property
    def alive(self) -> Mapping[str, Member]:
        """(On the head.) The launchers that are being heard of."""
        return self._core.alive

    def start(self, listener: Listener) -> None:
        """Listen and look for the others. Raises OSError if the port cannot be had."""
        self._allow_connections()
        self._transport.listen()
        self._core.start(listener)
        self._loop.every(TICK_S if len(self._core.consent.electorate) <= FEW else 2 * TICK_S, self._tick)

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> int:
        """See ``Quorum.propose``."""
        number = self._core.propose(slots, payload)
        self._flush_soon()
        return number

    def ready(self, number: int, answer: Message) -> None:
        """See ``Quorum.ready``."""
        self._core.ready(number, answer)
        self._flush_soon()

    def tell_head(self, message: Message) -> None:
        """See ``Quorum.tell_head``."""
        self._core.tell_head(message)
        self._flush_soon()

    def tell_all(self, message: Message) -> None:
        """See ``Quorum.tell_all``."""
        self._core.tell_all(message)
        self._flush_soon()

    def decide_tie(self, go_on: bool) -> None:
        """See ``Quorum.decide_tie``."""
        self._core.decide_tie(go_on)
        self._flush_soon()

    def leave(self) -> None:
        """Say goodbye and stop listening."""
        if not self._left:
            self._left = True
            self._core.leave()
            self._transport.close()

    def _allow_connections(self) -> None:
        """Raise the soft limit of open files to what a head needs: two connections to each launcher, and its ranks'."""
        needed = 2 * len(self._core.consent.electorate) + OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < needed:
            limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

    def _flush_soon(self) -> None:
        self._loop.later(0.0, self._core.flush)

    def _tick(self) -> None:
        if not self._left:
            self._core.tick(time.monotonic())

    def _lose(self, name: str) -> None:
        self._core.unreachable(time.monotonic(), name)

    def _receive(self, sender: Member, message: Message) -> None:
        if not self._left:
            self._core.receive(time.monotonic(), sender, message)
