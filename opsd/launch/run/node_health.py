"""Which nodes of a run are gone, which are to run no more ranks, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from opsd.launch.io.run_log import Log
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


class NodeHealth:
    """What the head knows about nodes. ``spares`` gives those that could take a place."""

    def __init__(self, log: Log, spares: Callable[[], Collection[str]]) -> None:
        self.gone: set[str] = set()
        self.flaps: Counter[str] = Counter()
        """How often nodes have been lost and have come back."""
        self._log = log
        self._spares = spares
        self._blame = Blame()
        self._unready: dict[str, str] = {}

    @property
    def unfit(self) -> set[str]:
        """The nodes that are to run no ranks."""
        return self._blame.unfit | self._unready.keys()

    @property
    def retired(self) -> set[str]:
        """Nodes that are still there, and are not to be used again."""
        return self._blame.unfit - self.gone

    def memory(self) -> dict[str, Any]:
        """What a successor has to know, for JSON."""
        return {**self._blame.memory(), "gone": sorted(self.gone), "flaps": self.flaps}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on from what the head before remembered."""
        self._blame.recall(memory)
        self.gone, self.flaps = set(memory["gone"]), Counter(memory["flaps"])

    def came(self, node: str) -> None:
        """A launcher has joined; whether it is ready it will say."""
        if node in self.gone:
            self.gone.discard(node)
            self.flaps[node] += 1
        self._unready.pop(node, None)

    def note_readiness(self, node: str, why: str) -> bool:
        """Use a spare only while it says that it may be; True if that has changed."""
        known = self._unready.pop(node, "")
        if why:
            self._unready[node] = why
        if why and why != known:
            self._log.emit("spare_refused", refused=node, reason=why)
        return why != known

    def call_back(self, node: str, reason: str) -> None:
        """The node is wanted elsewhere: it does not count as a spare until it comes again."""
        self._unready[node] = reason

    def judge(self, node: str, cause: Failure) -> None:
        """Let a spare take the place of a node that is still there, and has proven unfit."""
        reason = "" if node in self.gone else self._blame.charge(node, cause)
        if reason:
            self.retire(node, reason)

    def retire(self, node: str, reason: str) -> bool:
        """Have ``node`` run no more ranks if another can take its place."""
        if not self._spares():
            return False
        self._blame.unfit.add(node)
        self._log.emit("node_retired", retired=node, reason=reason)
        return True

    def keep(self, slots: Collection[str]) -> None:
        """Who of ``slots`` was to go, and is still there, stays if nobody can take its place."""
        if self._spares():
            return
        leaving = self.retired & set(slots)
        self._blame.unfit -= leaving
        for node in sorted(leaving):
            self.refuse_swap(node)

    def refuse_swap(self, node: str) -> None:
        """Note that ``node`` stays."""
        self._log.emit("swap_refused", swap=node, reason="there is no spare for it")
