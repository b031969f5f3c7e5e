"""Which nodes are to run no more ranks, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from opsd.launch.ranks.failure import Failure

BLAMED_OFTEN = 2
"""So many faults make a node unfit, though its hardware has not said that it fails."""


class Blame:
    """Counts the faults of nodes over the life of a run."""

    def __init__(self) -> None:
        self.unfit: set[str] = set()
        """Nodes whose place a spare has taken, or is about to take."""
        self._faults: Counter[str] = Counter()

    def charge(self, node: str, cause: Failure) -> str:
        """Count ``cause`` against ``node``; why a spare should take its place, "" while it may stay.

        An error of the program, or a connection lost, is no node's fault.
        """
        if cause.kind not in ("hardware", "signal", "hang"):
            return ""
        self._faults[node] += 1
        if cause.kind != "hardware" and self._faults[node] < BLAMED_OFTEN:
            return ""
        return f"{cause.cause}, fault number {self._faults[node]} of this node"

    def memory(self) -> dict[str, Any]:
        """What is held against whom, for JSON."""
        return {"unfit": sorted(self.unfit), "blamed": self._faults}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on from what another one remembered."""
        self.unfit = set(memory["unfit"])
        self._faults = Counter(memory["blamed"])
