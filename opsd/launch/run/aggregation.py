"""Aggregates failures and hangs over the nodes of a generation, and finds the rank that was first.

Times are sent as ages, so that clocks need not agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from opsd.launch.hangs.hang import Hang, RankStatus, is_hang, name_culprit
from opsd.launch.io.loop import Timer, Timers
from opsd.launch.ranks.failure import Failure, first_cause
from opsd.launch.run.messages import FailedRank, HangFound, RankStatuses
from opsd.launch.run.run_control import RankFailure
from opsd.launch.run.supervisor import Supervisor

AGGREGATION_S = 0.1
"""After a failure that is clearly a first cause: time for the reports of other nodes, for the record."""
LOG_LINES = 10
RANK_STATUS_S = 1.0
"""How long a node may take to report the status of its ranks."""
REPEAT_S = 1.0
"""Seconds between reports of a lasting hang to the leader."""

Stacks = Mapping[str, str | None]
"""By node: the file with the stacks of its ranks, None without one."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """A failure on ``node``; ``failure.t`` on the receiver's clock, ``log`` the path of the log, ``tail`` its end.

    Both are "" where there is no log to point to.
    """

    node: str
    failure: Failure
    log: str
    tail: str


def to_ages(found: Sequence[RankFailure], now: float) -> tuple[FailedRank, ...]:
    """The failures of this node; ``now`` on the clock of ``Failure.t``."""
    return tuple(FailedRank(aged(failure, now), str(rank.log), rank.log_tail(LOG_LINES)) for failure, rank in found)


def aged(failure: Failure, now: float) -> Failure:
    """``failure`` with its time converted to an age, or back."""
    return replace(failure, t=now - failure.t)


def reports(node: str, failures: Sequence[FailedRank], now: float) -> list[FailureReport]:
    """The failures that ``node`` reports."""
    return [FailureReport(node, aged(rank.failure, now), rank.log, rank.tail) for rank in failures]


class FailureAggregation:
    """Collects failures; calls ``judged`` with the first cause once all relevant reports should have come.

    If all failures look like consequences of another one, that one gets ``victim_s`` seconds to show.
    """

    def __init__(self, loop: Timers, victim_s: float, judged: Callable[[FailureReport], None]) -> None:
        self._loop = loop
        self._victim_s = victim_s
        self._judged = judged
        self._reports: list[FailureReport] = []
        self._timer: Timer | None = None
        self.noticed = self._loop.time()

    @property
    def open(self) -> bool:
        """True while reports are being collected."""
        return self._timer is not None

    def add(self, reports: Iterable[FailureReport], *, alone: bool) -> None:
        """Add the failures of a node; if it is ``alone`` at work, it knows the first cause."""
        self._reports += reports
        if alone:
            self.noticed = self._loop.time()
            self._settle()
            return
        clear = any(report.failure.kind != "communication" for report in self._reports)
        if self._timer is None:
            self.noticed = self._loop.time()
        elif clear:
            self._timer.cancel()
        else:
            return
        self._timer = self._loop.later(AGGREGATION_S if clear else self._victim_s, self._settle)

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


def rank_statuses(ranks: Sequence[RankStatus], now: float) -> tuple[RankStatus, ...]:
    """The statuses with their times converted to ages, or back."""
    return tuple(replace(rank, changed=now - rank.changed) for rank in ranks)


class LocalHang:
    """The latest hang of this node's ranks."""

    def __init__(self, node: Supervisor) -> None:
        self._node = node
        self._last: Hang | None = None
        self._generation = 0
        self._stacks: str | None = None
        self._told = 0.0

    def seen(self, hang: Hang) -> bool:
        """Remember a hang; True if the leader should be told now."""
        now = time.monotonic()
        if now - self._told < REPEAT_S:
            return False
        self._told = now
        self._last, self._generation, self._stacks = hang, self._node.generation.number, hang.stacks
        return True

    @property
    def lasts(self) -> bool:
        """Whether the ranks that run hang."""
        return self._last is not None and self._generation == self._node.generation.number

    def report(self) -> RankStatuses:
        """The status of the ranks and the file with their stacks; the leader may ask before a hang was seen here."""
        if self._generation != self._node.generation.number:
            self._last, self._generation, self._stacks = None, self._node.generation.number, None
        if self._stacks is None:
            self._stacks = self._node.write_stacks()
        return RankStatuses(self._generation, rank_statuses(self._rank_statuses(), time.monotonic()), self._stacks)

    def _rank_statuses(self) -> list[RankStatus]:
        """The current statuses, with what stacks and GPUs have shown of ranks that have not moved since."""
        seen = {rank.rank: rank for rank in self._last.ranks} if self._last is not None else {}
        return [
            replace(rank, waits=before.waits, where=before.where, gpu=before.gpu)
            if (before := seen.get(rank.rank)) is not None and before.changed == rank.changed
            else rank
            for rank in self._node.rank_statuses()
        ]

    def judged(self, found: HangFound) -> None:
        """The leader restarts the run for a hang: write the event on the culprit's node, where its agent reads it."""
        fields = found.fields
        self._node.accept_hang(str(fields["phase"]), found.score)
        ranks = [rank.rank for rank in self._node.generation.ranks]
        if fields["rank"] is None or fields["rank"] in ranks:
            self._node.events.write("hang_detected", None, {**fields, "stacks": self._stacks}, relayed=False)


class HangInquiry:
    """Asks all nodes for the status of their ranks when one reports a hang; calls ``found`` if it is one.

    It is not a hang while a rank waits for another that is within its limit, or while a node does not answer; the
    inquiry is then repeated at the next report. Nodes whose ranks have all ended are not asked.
    """

    def __init__(self, loop: Timers, ask: Callable[[], None], found: Callable[[Hang, Stacks], None]) -> None:
        self._loop = loop
        self._ask = ask
        self._found = found
        self._nodes: frozenset[str] = frozenset()
        self._rank_statuses: dict[str, list[RankStatus]] = {}
        self._stacks: dict[str, str | None] = {}
        self._timer: Timer | None = None

    def begin(self, nodes: Iterable[str]) -> None:
        """Ask ``nodes``, unless an inquiry is under way."""
        if self._timer is None:
            self._nodes, self._rank_statuses, self._stacks = frozenset(nodes), {}, {}
            self._timer = self._loop.later(RANK_STATUS_S, self.forget)
            self._ask()

    def add(self, node: str, ranks: list[RankStatus], stacks: str | None) -> None:
        """Add an answer."""
        if self._timer is None:
            return
        self._rank_statuses[node], self._stacks[node] = ranks, stacks
        if self._rank_statuses.keys() >= self._nodes:
            everyone = [rank for ranks in self._rank_statuses.values() for rank in ranks]
            self.forget()
            if everyone and is_hang(everyone):
                self._found(name_culprit(everyone), self._stacks)

    def forget(self) -> None:
        """Cancel the inquiry."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
