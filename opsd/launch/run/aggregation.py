"""What a generation died of: the failures that its nodes report, and which of them was first.

Moments travel as ages, so that clocks need not agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from opsd.launch.io.loop import Loop, Timer
from opsd.launch.ranks.failure import Failure, first_cause
from opsd.launch.run.messages import FailedRank
from opsd.launch.run.run_control import Failed

GATHER_S = 0.1
"""After a failure that is clearly a first cause: time for the other nodes' reports, for the record."""
LOG_LINES = 10


@dataclass(frozen=True, slots=True)
class Report:
    """A failure on ``node``; ``failure.t`` in the receiver's seconds, ``log`` the rank's log and ``tail`` its end."""

    node: str
    failure: Failure
    log: str
    tail: str


def to_ages(found: Sequence[Failed], now: float) -> tuple[FailedRank, ...]:
    """The failures of this node; ``now`` on the clock of ``Failure.t``."""
    return tuple(FailedRank(aged(failure, now), str(rank.log), rank.log_tail(LOG_LINES)) for failure, rank in found)


def aged(failure: Failure, now: float) -> Failure:
    """``failure`` with its age for its moment, and back."""
    return replace(failure, t=now - failure.t)


def reports(node: str, failures: Sequence[FailedRank], now: float) -> list[Report]:
    """The failures that ``node`` reports."""
    return [Report(node, aged(rank.failure, now), rank.log, rank.tail) for rank in failures]


class FailureAggregation:
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
