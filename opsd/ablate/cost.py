"""What the runs of a study cost, from the files that each has left. Pure.

A cell holds its devices from the start of a job, or of a launcher on this machine, until that ends. As in Slurm's
accounting, a job that is preempted ends with the signal that tells it so. Those hours are all paid for. Some of them
bring nothing:

===========  =========================================================================================================
preempted    from a start after the first until its first step, and from the last step before it until that start ended
recomputed   in steps that had been done before
failures     between two generations of one start: a rank died or hung
===========  =========================================================================================================
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Final

from opsd.ledger.ledger import repeated_share

Record = Mapping[str, Any]
LEAST: Final = 0.005
"""GPU-hours below this are shown as 0.00, or left out."""


@dataclass(frozen=True, slots=True)
class Cost:
    """GPU-hours in all, and those of them that brought nothing. Each rank counts as a GPU where there are none."""

    gpu_hours: float = 0.0
    preempted: float = 0.0
    recomputed: float = 0.0
    failures: float = 0.0

    @property
    def lost(self) -> float:
        """The hours that brought nothing."""
        return self.preempted + self.recomputed + self.failures


def sum_of(costs: Iterable[Cost]) -> Cost:
    """Their sum."""
    costs = list(costs)
    return Cost(*(sum(getattr(cost, field.name) for cost in costs) for field in fields(Cost)))


def cost_line(cost: Cost) -> str:
    """The cost in words."""
    parts = [
        f"{hours:,.2f} {what}"
        for hours, what in (
            (cost.preempted, "to preemptions"), (cost.recomputed, "to recomputed steps"), (cost.failures, "to failures")
        )
        if hours >= LEAST
    ]  # fmt: skip
    lost = f", of which {', '.join(parts)} were lost" if parts else ""
    return f"{cost.gpu_hours:,.2f} GPU-hours{lost}"


@dataclass(slots=True)
class _Generation:
    """The ranks between two restarts; times in epoch seconds. ``first`` is the begin of its first step."""

    began: float
    gpus: int
    ended: float
    first: float | None = None
    last: float | None = None


def cost_of(
    events: Sequence[Record], metrics: Sequence[Record], starts: Sequence[float], ends: Sequence[float] = ()
) -> Cost:
    """The cost of a run from its records, which are in the order of time.

    ``starts`` and ``ends`` are the epoch seconds at which it got its devices and gave them back. Without starts each
    generation is one. A start whose end is not known ended with its last record.
    """
    generations = _generations(events, metrics)
    if not generations:
        return Cost()
    began = [generation.began for generation in generations]
    starts = sorted({*starts, began[0]}) if starts and min(starts) > began[0] else sorted(starts) or began
    spans: dict[int, list[_Generation]] = {}
    for generation in generations:
        spans.setdefault(bisect_right(starts, generation.began) - 1, []).append(generation)
    hours = preempted = failures = 0.0
    for number, (at, span) in enumerate(spans.items()):
        gpus, following = span[-1].gpus, starts[at + 1] if at + 1 < len(starts) else math.inf
        known = [end for end in ends if starts[at] <= end <= following]
        ended = min(known) if known else max(generation.ended for generation in span)
        hours += gpus * (ended - starts[at])
        if number:
            preempted += gpus * ((span[0].ended if span[0].first is None else span[0].first) - starts[at])
        if number < len(spans) - 1 and span[-1].last is not None:
            preempted += gpus * max(0.0, ended - span[-1].last)
        failures += sum(gpus * _gap(before, after) for before, after in pairwise(span))
    return Cost(hours / 3600, preempted / 3600, _recomputed(metrics, generations) / 3600, failures / 3600)


def _generations(events: Sequence[Record], metrics: Sequence[Record]) -> list[_Generation]:
    found: dict[int, _Generation] = {}
    for event in events:
        t, number = float(event["t"]), int(event["generation"])
        if event["event"] == "generation_started" and number not in found:
            found[number] = _Generation(t, int(event.get("gpus") or event.get("world_size") or 0), t)
        elif number in found:
            found[number].ended = max(found[number].ended, t)
    for line in metrics:
        if (own := found.get(int(line["generation"]))) is not None:
            t = float(line["t"])
            own.first = t - float(line["step_s"]) if own.first is None else own.first
            own.last, own.ended = t, max(own.ended, t)
    return sorted(found.values(), key=lambda generation: generation.began)


def _gap(before: _Generation, after: _Generation) -> float:
    """Seconds without a step between two generations of a start."""
    from_ = before.began if before.last is None else before.last
    return max(0.0, (after.ended if after.first is None else after.first) - from_)


def _recomputed(metrics: Sequence[Record], generations: Sequence[_Generation]) -> float:
    """GPU-seconds in steps that had been done before."""
    began = [generation.began for generation in generations]
    highest, seconds = -1, 0.0
    for line in metrics:
        gpus = generations[max(0, bisect_right(began, float(line["t"])) - 1)].gpus
        seconds += gpus * float(line["step_s"]) * repeated_share(line, highest)
        highest = max(highest, int(line["step"]))
    return seconds
