"""What this node knows of a hang that the head judges."""

from __future__ import annotations

import time
from dataclasses import replace

from opsd.launch.hangs.hang import Hang, Standing
from opsd.launch.run.messages import HangFound, Standings
from opsd.launch.run.reports import standings
from opsd.launch.run.supervisor import Supervisor

AGAIN_S = 1.0
"""How often the head is told of a hang that lasts."""


class LocalHang:
    """The hang of this node's ranks, as it was last seen here."""

    def __init__(self, node: Supervisor) -> None:
        self._node = node
        self._last: Hang | None = None
        self._generation = 0
        self._stacks: str | None = None
        self._told = 0.0

    def seen(self, hang: Hang) -> bool:
        """Keep what was seen; True if the head is to be told."""
        now = time.monotonic()
        if now - self._told < AGAIN_S:
            return False
        self._told = now
        self._last, self._generation, self._stacks = hang, self._node.generation.number, hang.stacks
        return True

    @property
    def lasts(self) -> bool:
        """Whether a hang was seen of the ranks that run."""
        return self._last is not None and self._generation == self._node.generation.number

    def report(self) -> Standings:
        """Where the ranks stand, and the file with their stacks; the head may ask before a hang was seen."""
        if self._generation != self._node.generation.number:
            self._last, self._generation, self._stacks = None, self._node.generation.number, None
        if self._stacks is None:
            self._stacks = self._node.write_stacks()
        return Standings(self._generation, standings(self._standings(), time.monotonic()), self._stacks)

    def _standings(self) -> list[Standing]:
        """Where the ranks stand now, with what the stacks have said of those that have not moved since."""
        seen = {rank.rank: rank for rank in self._last.ranks} if self._last is not None else {}
        return [
            replace(rank, waits=seen[rank.rank].waits, where=seen[rank.rank].where)
            if rank.rank in seen and seen[rank.rank].changed == rank.changed
            else rank
            for rank in self._node.standings()
        ]

    def judged(self, found: HangFound) -> None:
        """The head restarts the run for it: note the event where the agent of this node looks, if it is its to note."""
        fields = found.fields
        self._node.accept_hang(str(fields["phase"]), found.score)
        ranks = [rank.rank for rank in self._node.generation.ranks]
        if fields["rank"] is None or fields["rank"] in ranks:
            self._node.events.write("hang_detected", None, {**fields, "stacks": self._stacks}, relayed=False)
