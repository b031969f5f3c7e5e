"""Launchers of a run in virtual time: production's groups, elections and leader, on a network that takes time.

Each launcher is a ``Group`` without ranks. Its single thread takes the time of ``Costs`` for every message that it
sends or receives, so that a leader with too much to do is late, as a real one would be.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial

from opsd.launch.claims.messages import MESSAGES, Message
from opsd.launch.io.connection import encode
from opsd.launch.io.protocol import Codec, Member
from opsd.simulate.launcher import Launcher
from opsd.simulate.surroundings import FREE, Costs, Surroundings, Traffic

LATENCY_S = 0.0001
"""Of the network, one way: a fat tree with TCP."""
TIMED = 4
"""Those that lead in turn; a clock of CPU time is slow."""
SPREAD_S = 1.0
"""All launchers are started within this."""
FRAME_BYTES = 20
"""Length and tag of a frame (opsd/launch/io/connection.py)."""
_CODEC = Codec(MESSAGES)


class Launchers(Surroundings):
    """``ranked`` launchers with ranks and ``spares`` without, numbered by precedence."""

    def __init__(self, ranked: int, spares: int = 0, costs: Costs = FREE) -> None:
        super().__init__(ranked, spares, costs)
        self._encoded: tuple[Message | None, int] = (None, 0)
        size = len(self.members)
        self.all = {name: Launcher(self, member, SPREAD_S * (k + 1) / size, time.thread_time if k < TIMED else float)
                    for k, (name, member) in enumerate(self.members.items())}  # fmt: skip

    @property
    def alive(self) -> list[Launcher]:
        """Those that have not been lost."""
        return [one for one in self.all.values() if not one.dead]

    @property
    def leader(self) -> Launcher:
        """The maker of the newest claim."""
        return self.all[self.claims[-1].plan["head"]]

    def lose(self, name: str) -> None:
        """The machine of ``name`` loses its power, without a message."""
        self.all[name].dead = True

    def pass_time(self, seconds: float) -> float:
        """Let so many seconds pass, in which ``traffic`` is counted; returns them."""
        self._count_anew()
        self.loop.run(self.loop.time() + seconds)
        return seconds

    def _count_anew(self) -> None:
        self.bytes_read = 0
        for one in self.all.values():
            one.traffic = Traffic()

    def until_agreed(self, *, without: Collection[str] = (), limit_s: float = 120.0) -> float:
        """Run until all have begun one generation whose ranks are on none of ``without``; returns the seconds.

        ``traffic`` is that of this time. Raises TimeoutError.
        """
        self._count_anew()
        began = self.loop.time()
        while True:
            numbers = {one.began for one in self.alive}
            if (
                self.claims
                and numbers == {self.claims[-1].number}
                and not {*without} & {*self.claims[-1].plan["slots"]}
            ):
                return max(one.began_at for one in self.alive) - began
            if self.ended or self.loop.time() - began > limit_s:
                why = self.ended or f"{len(self.alive)} launchers agree on no generation within {limit_s:g} s"
                raise TimeoutError(why)
            self.loop.run(self.loop.time() + self.tick_s)

    def send(self, source: str, target: Member, message: Message) -> None:
        """Encoded as production does, once for a message to many."""
        sender = self.all[source]
        began = sender.clock()
        if new := self._encoded[0] is not message:
            self._encoded = (message, len(encode(_CODEC.encode(message))) + FRAME_BYTES)
        size = self._encoded[1]
        sender.has_sent(target.name, size, new=new)
        one = self.all[target.name]
        self.loop.later(sender.busy_until - self.loop.time() + LATENCY_S, partial(one.arrives, source, message, size))
        sender.traffic.cpu_s -= sender.clock() - began
