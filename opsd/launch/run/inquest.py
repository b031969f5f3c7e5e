"""What a generation on several nodes died of, from what its nodes report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from opsd.launch.hangs.hang import Hang, Standing, name_culprit, stuck_together
from opsd.launch.io.loop import Loop, Timer
from opsd.launch.ranks.failure import first_cause
from opsd.launch.run.reports import Report

GATHER_S = 0.1
"""After a failure that is clearly a first cause: time for the other nodes' reports, for the record."""
STANDINGS_S = 1.0
"""How long a node may take to say where its ranks stand."""

Stacks = Mapping[str, str | None]
"""By node: the file with the stacks of its ranks, None where there is none."""


class Inquest:
    """Gathers failures; ``judged`` is called with the first cause once all that matter should have come.

    After failures that all look like the consequence of another, that other has ``victim_s`` to show.
    """

    def __init__(self, loop: Loop, victim_s: float, judged: Callable[[Report], None]) -> None:
        self._loop = loop
        self._victim_s = victim_s
        self._judged = judged
        self._reports: list[Report] = []
        self._timer: Timer | None = None
        self.noticed = time.monotonic()

    @property
    def open(self) -> bool:
        """True while reports are being gathered."""
        return self._timer is not None

    def add(self, reports: Iterable[Report], *, alone: bool) -> None:
        """Take in the failures of a node; if it is the only one at work it knows the first cause."""
        self._reports += reports
        if alone:
            self.noticed = time.monotonic()
            self._settle()
            return
        clear = any(report.failure.kind != "communication" for report in self._reports)
        if self._timer is None:
            self.noticed = time.monotonic()
        elif clear:
            self._timer.cancel()
        else:
            return
        self._timer = self._loop.later(GATHER_S if clear else self._victim_s, self._settle)

    def _settle(self) -> None:
        cause = first_cause([report.failure for report in self._reports])
        report = next(report for report in self._reports if report.failure is cause)
        self.forget()
        self._judged(report)

    def forget(self) -> None:
        """The generation has ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._reports = None, []


class HangInquiry:
    """Asks all nodes where their ranks stand when one of them reports a hang; ``found`` is called if it is one.

    It is none while somebody waits for a rank that is within its limit, or while a node does not answer: then it is
    asked again at the next report. Nodes whose ranks have all ended have nothing to answer, and are not asked.
    """

    def __init__(self, loop: Loop, ask: Callable[[], None], found: Callable[[Hang, Stacks], None]) -> None:
        self._loop = loop
        self._ask = ask
        self._found = found
        self._nodes: frozenset[str] = frozenset()
        self._standings: dict[str, list[Standing]] = {}
        self._stacks: dict[str, str | None] = {}
        self._timer: Timer | None = None

    def begin(self, nodes: Iterable[str]) -> None:
        """Ask ``nodes``, unless that is going on."""
        if self._timer is None:
            self._nodes, self._standings, self._stacks = frozenset(nodes), {}, {}
            self._timer = self._loop.later(STANDINGS_S, self.forget)
            self._ask()

    def add(self, node: str, ranks: list[Standing], stacks: str | None) -> None:
        """Take in an answer."""
        if self._timer is None:
            return
        self._standings[node], self._stacks[node] = ranks, stacks
        if self._standings.keys() >= self._nodes:
            everyone = [rank for ranks in self._standings.values() for rank in ranks]
            self.forget()
            if everyone and stuck_together(everyone):
                self._found(name_culprit(everyone), self._stacks)

    def forget(self) -> None:
        """Nobody is asked any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
