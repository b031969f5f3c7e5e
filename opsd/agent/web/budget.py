"""Limits the agent's processor time for each peer of the HTTP server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Final

from opsd.agent.web.access import Attempts

CONNECTIONS: Final = 200, 0.01
"""How many connections a peer may make at once, and seconds until the next one."""
ANSWERS: Final = 2.0, 0.1
"""Seconds of processor time for the answers to a peer that are made for it alone: at once, and in each second."""


class Budget:
    """``burst_s`` seconds of processor time at once for each peer, then ``share`` of a core. Any thread may ask.

    A peer in debt waits until the debt is paid. ``MAX_PEERS`` are remembered.
    """

    MAX_PEERS: Final = 1024

    def __init__(self, burst_s: float, share: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ahead_s, self._share, self._clock = burst_s / share, share, clock
        self._paid_at: dict[str, float] = {}
        self._guard = threading.Lock()

    def affords(self, peer: str) -> bool:
        """Whether ``peer`` has anything left."""
        with self._guard:
            return self._paid_at.get(peer, 0.0) <= self._clock() + self._ahead_s

    def charge(self, peer: str, used_s: float) -> None:
        """Take off what an answer for ``peer`` has cost."""
        with self._guard:
            self._paid_at[peer] = max(self._paid_at.pop(peer, 0.0), self._clock()) + used_s / self._share
            if len(self._paid_at) > self.MAX_PEERS:
                del self._paid_at[next(iter(self._paid_at))]


class Budgets:
    """Those of all peers. Root and this user, or whoever is ``unlimited``, may connect and ask as they like."""

    def __init__(
        self,
        *,
        unlimited: Collection[str] | None = None,
        connections: Attempts | None = None,
        answers: Budget | None = None,
    ) -> None:
        self._unlimited = {f"uid {uid}" for uid in (0, os.geteuid())} if unlimited is None else unlimited
        self._connections = connections or Attempts(*CONNECTIONS)
        self._answers = answers or Budget(*ANSWERS)

    def may_connect(self, peer: str) -> bool:
        """Count a connection of ``peer``; whether it is served. For one thread."""
        return peer in self._unlimited or self._connections.allow(peer)

    def may_ask(self, peer: str) -> bool:
        """Whether ``peer`` may have an answer that costs something."""
        return peer in self._unlimited or self._answers.affords(peer)

    def charge(self, peer: str, used_s: float) -> None:
        """Take off what it has cost."""
        self._answers.charge(peer, used_s)
