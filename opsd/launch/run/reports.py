"""What launchers tell each other about ranks, as JSON. Moments travel as ages, so that clocks need not agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from opsd.launch.hangs.hang import Standing
from opsd.launch.ranks.failure import Failure, Kind, RankError
from opsd.launch.run.run_control import Failed

LOG_LINES = 10


class BadReport(ValueError):
    """A message that is not what a launcher of this version sends."""


@dataclass(frozen=True, slots=True)
class Report:
    """A failure on ``node``; ``failure.t`` in the receiver's seconds, ``log`` the rank's log and ``tail`` its end."""

    node: str
    failure: Failure
    log: str
    tail: str


def failed_to_json(found: Sequence[Failed], now: float) -> list[dict[str, Any]]:
    """The failures of this node; ``now`` on the clock of ``Failure.t``."""
    return [failure_to_json(failure, now, str(rank.log), rank.log_tail(LOG_LINES)) for failure, rank in found]


def failure_to_json(failure: Failure, now: float, log: str = "", tail: str = "") -> dict[str, Any]:
    """One failure, of a rank with that log or of one that has never begun."""
    fields = {name: value for name, value in asdict(failure).items() if name != "t"}
    return {**fields, "age_s": now - failure.t, "log": log, "tail": tail}


def failed_from_json(node: str, failures: Sequence[Mapping[str, Any]], now: float) -> list[Report]:
    """The failures that ``node`` reports. Raises BadReport."""
    try:
        return [_report(node, dict(raw), now) for raw in failures]
    except (KeyError, TypeError, ValueError) as error:
        raise BadReport(f"{node} reports failures that make no sense: {error!r}") from error


def _report(node: str, raw: dict[str, Any], now: float) -> Report:
    log, tail, age = str(raw.pop("log")), str(raw.pop("tail")), float(raw.pop("age_s"))
    error = raw.pop("error")
    if raw["kind"] not in get_args(Kind):
        raise ValueError(raw["kind"])
    failure = Failure(**raw, t=now - age, error=None if error is None else RankError(**error))
    return Report(node, failure, log, tail)


def standings_to_json(ranks: Sequence[Standing], now: float) -> list[dict[str, Any]]:
    """Where this node's ranks stand; ``now`` on the clock of ``Standing.changed``."""
    return [{**asdict(rank), "changed": now - rank.changed} for rank in ranks]


def standings_from_json(ranks: Sequence[Mapping[str, Any]], now: float) -> list[Standing]:
    """Where the ranks of another node stand, in the receiver's seconds. Raises BadReport."""
    try:
        standings = [Standing(**raw) for raw in ranks]
        return [replace(rank, changed=now - _finite(rank.changed)) for rank in standings]
    except (TypeError, ValueError) as error:
        raise BadReport(f"a node reports standings that make no sense: {error!r}") from error


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(value)
    return value
