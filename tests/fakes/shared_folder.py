"""The claims of ``opsd.checkpoints.claims`` in a simulated folder that all nodes share, on a file server of its own.

Operations take time, and every one is two events: it happens on the server, and later its answer arrives. In between
the server, or the way of one client to it, may stall; what waited goes on in any order once the stall is over. A client
that dies loses its answers, what it has asked for may still happen.
"""

from __future__ import annotations

import errno
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from opsd.checkpoints.claims import Claim, ClaimError
from tests.fakes.virtual_time import Call, World

T = TypeVar("T")
Done = Callable[[T | ClaimError], object]


@dataclass(slots=True)
class Trouble:
    """How bad the server is at present; shares of operations are from 0 to 1, times in seconds."""

    failed: float = 0.0
    """Share of operations that end with an error and have not happened."""
    answer_lost: float = 0.0
    """Share of operations that end with an error, but have happened."""
    stale_s: float = 0.0
    """How old what a client reads may be, unless it has changed the folder itself since; NFS may keep it for 60 s."""
    least_s: float = 0.0005
    most_s: float = 0.02


class SharedFolder:
    """Operations of the clients, nodes of ``world``, by name; ``done`` gets the result or a ClaimError."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.trouble = Trouble()
        self.history: list[tuple[float, Claim]] = []
        """Every claim that was made, in the order of time, with the second at which it was made: the truth."""
        self._made: dict[int, Claim] = {}
        self._newest: list[tuple[float, Claim | None]] = [(-math.inf, None)]
        self._leases: deque[tuple[float, tuple[int, int]]] = deque([(-math.inf, (0, 0))], maxlen=500)
        self._world = world
        self._chance = chance
        self._seen: dict[str, float] = {}
        self._stalled: set[str | None] = set()
        self._held: list[tuple[str, Call]] = []

    def create(self, client: str, claim: Claim, done: Done[bool]) -> None:
        """As ``claims.create``: exactly one claim of a number is made, whatever its claimants see."""

        def make() -> Callable[[], bool]:
            if claim.number not in self._made:
                self._made[claim.number] = claim
                self.history.append((self._world.now, claim))
            newest = self._newest[-1][1]
            if newest is None or newest.number < claim.number:
                self._newest.append((self._world.now, newest := claim))
            self._seen[client] = self._world.now
            mine = newest.number == claim.number and newest.launcher == claim.launcher
            return lambda: mine

        self._operate(client, make, done)

    def newest(self, client: str, done: Done[Claim | None]) -> None:
        """As ``claims.newest``, perhaps as it was some time ago."""

        def look() -> Callable[[], Claim | None]:
            seen = bisect_right(self._newest, self._moment_seen(client), key=lambda entry: entry[0])
            found = self._newest[seen - 1][1]
            return lambda: found

        self._operate(client, look, done)

    def renew(self, client: str, number: int, beat: int, done: Done[None]) -> None:
        """As ``claims.renew``."""

        def write() -> Callable[[], None]:
            self._leases.append((self._world.now, (number, beat)))
            return lambda: None

        self._operate(client, write, done)

    def lease(self, client: str, done: Done[tuple[int, int]]) -> None:
        """As ``claims.lease``, perhaps as it was some time ago."""

        def read() -> Callable[[], tuple[int, int]]:
            at = self._moment_seen(client)
            found = next((content for t, content in reversed(self._leases) if t <= at), self._leases[0][1])
            return lambda: found

        self._operate(client, read, done)

    def stall(self, client: str | None = None) -> None:
        """Let nothing happen on the server, or nothing for one client."""
        self._stalled.add(client)

    def go_on(self, client: str | None = None) -> None:
        """End a stall; what waited goes on in any order."""
        self._stalled.discard(client)
        held, self._held = self._held, []
        for owner, call in held:
            self._soon(owner, call)

    def heal(self) -> None:
        """End all stalls and all trouble."""
        self.trouble = Trouble()
        for client in (*self._stalled, None):
            self.go_on(client)

    def _operate(self, client: str, act: Callable[[], Callable[[], T]], done: Done[T]) -> None:
        """``act`` happens on the server and returns what gives the answer."""
        life = self._world.life(client)

        def happen() -> None:
            luck = self._chance.random()
            failed = luck < self.trouble.failed
            answer = None if failed else act()
            told = answer if luck >= self.trouble.failed + self.trouble.answer_lost else None
            self._soon(client, lambda: arrive(told))

        def arrive(told: Callable[[], T] | None) -> None:
            result = ClaimError(errno.EIO, "the file server does not answer") if told is None else told()
            if life and self._world.life(client) == life:
                self._world.tell(client, lambda: done(result))

        self._soon(client, happen)

    def _soon(self, client: str, call: Call) -> None:
        def flow() -> None:
            if self._stalled & {None, client}:
                self._held.append((client, call))
            else:
                call()

        self._world.later(self._chance.uniform(self.trouble.least_s, self.trouble.most_s), flow)

    def _moment_seen(self, client: str) -> float:
        """As of when a client sees the folder: never before what it has seen already or has made itself."""
        oldest = max(self._world.now - self.trouble.stale_s, self._seen.get(client, 0.0))
        self._seen[client] = self._chance.uniform(oldest, self._world.now)
        return self._seen[client]
