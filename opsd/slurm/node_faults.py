"""What the cluster remembers of this node: its faults of the last 30 days, and whether it is a lemon."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from opsd import lemons
from opsd.collectors.slurm import NodeRecord
from opsd.slurm.candidates import faults
from opsd.slurm.port import SlurmNodes

OWN_S: Final = 600.0
"""Seconds between two looks at the node's own comment."""
FLEET_S: Final = 6 * 3600.0
"""Seconds between two looks at all comments."""
SUSPECT: Final = 2
"""Faults from which on a node asks for those of all others: few nodes of a cluster have so many in a month."""


class NodeFaults:
    """The record of ``node``, from the comments that Slurm keeps."""

    def __init__(
        self,
        slurm: SlurmNodes,
        node: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._slurm, self._node, self._clock, self._wall = slurm, node, clock, wall
        self._record: NodeRecord | None = None
        self._own_at = self._fleet_at = float("-inf")
        self._judged: lemons.Judgement | None = None

    def refresh(self) -> NodeRecord:
        """The record, at most as old as ``OWN_S``; the judgement in it as old as ``FLEET_S``. Raises SlurmError."""
        now = self._clock()
        if self._record is None or now - self._own_at >= OWN_S:
            self._record = self._look(now)
            self._own_at = now
        return self._record

    def _look(self, now: float) -> NodeRecord:
        own = lemons.judge([self._node], faults(self._slurm.comments([self._node])), self._wall())
        score = next(iter(own.scores), lemons.Score(self._node, 0, 0, 0.0))
        if score.faults < SUSPECT:
            self._judged = None
            return NodeRecord(score.faults, score.weight)
        if self._judged is None or now - self._fleet_at >= FLEET_S:
            names = [node.name for node in self._slurm.nodes()]
            self._judged = lemons.judge(names, faults(self._slurm.comments()), self._wall())
            self._fleet_at = now
        confidence = next((s.confidence for s in self._judged.scores if s.node == self._node), 0.0)
        called = any(lemon.node == self._node for lemon in self._judged.lemons)
        return NodeRecord(score.faults, score.weight, confidence, called)
