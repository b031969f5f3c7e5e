"""The repairs of this node in the agent's memory and journal.

A repair is a program of its own, with a record of its own that is durable before each step: nothing waits for the
agent. The agent takes in what those records say, so that its journal has the whole history of the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import is_not

from opsd.agent.journal import Journal
from opsd.agent.window import Window
from opsd.collectors.base import RepairFact
from opsd.collectors.repairs import COLLECTOR, MOST


class Repairs:
    """What is known of this node's repairs. Used in one thread.

    A repair is one row of the journal, which each of its steps replaces: none is there twice, whatever is repeated.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: dict[str, RepairFact] = {}
        self._written: dict[str, RepairFact] = {}
        self._found: Sequence[RepairFact] = ()
        self._opened = 0
        self.shown: tuple[RepairFact, ...] = ()
        """Oldest first, as their ids sort whatever the clock said.

        One without an end that is no longer on record is ``unknown``.
        """

    def remember(self, repairs: Sequence[RepairFact]) -> None:
        """Go on from what an earlier agent wrote."""
        self._opened = self._journal.opened
        self._written = {repair.id: repair for repair in repairs}
        self._know({**self._written, **self._known})

    def take(self, view: Window) -> None:
        """One tick: take in the records of repairs, and write what the journal does not have, as after it was lost."""
        reopened = self._opened != self._journal.opened
        if reopened:
            self._opened, self._written = self._journal.opened, {}
        found = view.repairs if view.known(COLLECTOR.name) else self._found
        if reopened or len(found) != len(self._found) or any(map(is_not, found, self._found)):
            self._found = found
            self._know(self._known | {repair.id: repair for repair in found})
            for id, repair in self._known.items():
                if self._written.get(id) != repair:
                    self._journal.repair(repair)
            self._written = self._known

    def _know(self, repairs: dict[str, RepairFact]) -> None:
        newest = sorted(repairs.values(), key=lambda repair: (repair.end is None, repair.id))[-MOST:]
        self._known = {repair.id: repair for repair in newest}
        present = {repair.id for repair in self._found}
        told = (r if r.end or r.id in present else replace(r, end="unknown") for r in newest)
        self.shown = tuple(sorted(told, key=lambda repair: repair.id))
