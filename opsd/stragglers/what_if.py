"""The duration of a step if some of its work were different, also in a pipeline.

The schedule is 1F1B (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021). Replacing the times of some ranks and comparing durations follows Lin et al., "Understanding
Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from opsd.stragglers.trace import BACKWARD, FORWARD, STEP, Place, Rows, Trace, middles


class WhatIf:
    """The duration of a step if some of the work were different."""

    def __init__(self, trace: Trace, halved: tuple[Rows, Rows] | None = None) -> None:
        self.trace = trace
        self.forward, self.backward = halved if halved is not None else halves(trace)
        self._completion = Completion(trace.places, trace.microbatches)
        self.seconds = fmean(self._completion.seconds(self.forward, self.backward))
        whole = trace.rows(STEP)
        self.rest = max(0.0, fmean(middles(whole, trace.places)) - self.seconds) if whole is not None else 0.0

    def without(self, slow: Iterable[int]) -> WhatIf:
        """With the times of the median of their peers for these ranks."""
        slow = set(slow)
        if not slow:
            return self
        halved: list[dict[int, Sequence[float]]] = [dict(self.forward), dict(self.backward)]
        for group in self.trace.groups():
            peers = [rank for rank in group if rank not in slow]
            for rank in slow.intersection(group) if peers else ():
                for rows in halved:
                    rows[rank] = middles(rows, peers)
        changed = WhatIf(self.trace, (halved[0], halved[1]))
        changed.rest = self.rest
        return changed

    def slowdown(self, forward: Rows, backward: Rows) -> float:
        """By which factor the steps are longer than with this work."""
        better = fmean(self._completion.seconds(forward, backward)) + self.rest
        return (self.seconds + self.rest) / better if better > 0 else 1.0


_FORWARD_SHARE = 1 / 3
"""Of the operations of a step; the backward pass computes two gradients for each product (Kaplan et al., 2020)."""


def halves(trace: Trace) -> tuple[Rows, Rows]:
    """Forward and backward seconds of each rank; what is not told apart is divided by the usual shares."""
    work = trace.work()
    forward, backward = trace.rows(FORWARD), trace.rows(BACKWARD)
    if forward is None or backward is None:
        return (
            {rank: [_FORWARD_SHARE * s for s in row] for rank, row in work.items()},
            {rank: [(1 - _FORWARD_SHARE) * s for s in row] for rank, row in work.items()},
        )
    parts: tuple[dict[int, list[float]], dict[int, list[float]]] = ({}, {})
    for rank, row in work.items():
        shares = [
            f / (f + b) if f + b > 0 else _FORWARD_SHARE for f, b in zip(forward[rank], backward[rank], strict=True)
        ]
        parts[0][rank] = [share * s for share, s in zip(shares, row, strict=True)]
        parts[1][rank] = [(1 - share) * s for share, s in zip(shares, row, strict=True)]
    return parts


class Completion:
    """The duration of a step for given work: all pipelines work side by side, and the slowest decides."""

    def __init__(self, places: Mapping[int, Place], microbatches: int | None) -> None:
        pipelines: dict[tuple[int, int, int], list[int]] = {}
        for rank in sorted(places, key=lambda rank: places[rank].pp):
            place = places[rank]
            pipelines.setdefault((place.dp, place.tp, place.cp), []).append(rank)
        self._pipelines = list(pipelines.values())
        self._microbatches = microbatches

    def seconds(self, forward: Rows, backward: Rows) -> list[float]:
        """Of each step. Without the number of micro-batches the slowest rank decides, as with very many of them."""
        if self._microbatches is None or max(map(len, self._pipelines)) == 1:
            sums = ([f + b for f, b in zip(forward[r], backward[r], strict=True)] for p in self._pipelines for r in p)
            return [max(step) for step in zip(*sums, strict=True)]
        steps = len(next(iter(forward.values())))
        return [
            max(
                one_f_one_b([forward[r][step] for r in ranks], [backward[r][step] for r in ranks], self._microbatches)
                for ranks in self._pipelines
            )
            for step in range(steps)
        ]


def one_f_one_b(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> float:
    """Seconds of a step whose stages work ``forward`` and ``backward`` seconds in total, transfers not counted."""
    stages = len(forward)
    each = [f / microbatches for f in forward], [b / microbatches for b in backward]
    orders = [_order(stages - stage, microbatches) for stage in range(stages)]
    ends = [[[-1.0] * microbatches for _ in range(stages)] for _ in range(2)]
    clock, at = [0.0] * stages, [0] * stages
    left = 2 * stages * microbatches
    while left:
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                way, batch = order[at[stage]]
                ready = _ready(ends, way, stage, batch, stages)
                if ready < 0:
                    break
                clock[stage] = ends[way][stage][batch] = max(clock[stage], ready) + each[way][stage]
                at[stage] += 1
                left -= 1
    return max(clock)


def _ready(ends: Sequence[Sequence[Sequence[float]]], way: int, stage: int, batch: int, stages: int) -> float:
    """When the input of a pass exists, -1.0 if that is not known yet."""
    if way == 0:
        return ends[0][stage - 1][batch] if stage else 0.0
    return ends[1][stage + 1][batch] if stage < stages - 1 else ends[0][stage][batch]


def _order(depth: int, microbatches: int) -> list[tuple[int, int]]:
    """The passes of a stage, 0 forward and 1 backward, each with its micro-batch; ``depth`` stages begin here."""
    warm = min(depth, microbatches)
    order = [(0, batch) for batch in range(warm)]
    for batch in range(microbatches):
        order.append((1, batch))
        if warm + batch < microbatches:
            order.append((0, warm + batch))
    return order
