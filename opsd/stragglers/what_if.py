"""The duration of a step if some of its work were different."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from opsd.stragglers.pipeline import Completion, halves
from opsd.stragglers.trace import STEP, Rows, Trace, middles


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
