"""Failures and standings of ranks as they travel: moments as ages, so that clocks need not agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from opsd.launch.hangs.hang import Standing
from opsd.launch.ranks.failure import Failure
from opsd.launch.run.messages import FailedRank
from opsd.launch.run.run_control import Failed

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


def standings(ranks: Sequence[Standing], now: float) -> tuple[Standing, ...]:
    """Where ranks stand, the moments turned into ages, and back."""
    return tuple(replace(rank, changed=now - rank.changed) for rank in ranks)
