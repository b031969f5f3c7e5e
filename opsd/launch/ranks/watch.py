"""Watches the rank pages of a generation: how far the run is, what it has made durable, what its ranks report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opsd.client import RankPage
from opsd.launch.io.events import EventLog, EventTail
from opsd.launch.ranks.ranks import Generation, Rank
from opsd.launch.ranks.rundir import rank_events

_OURS = ("t", "event", "generation", "run", "node")
"""Fields of an event that a rank does not decide."""


@dataclass(slots=True)
class Recovery:
    """A generation on its way back after a failure that was noticed at the monotonic second ``noticed``."""

    noticed: float
    previous_step: int | None


@dataclass(slots=True)
class Progress:
    """How far the run has come over all generations: highest completed step, highest durable checkpoint."""

    events: EventLog
    furthest: int | None = None
    committed: int | None = None
    recovery: Recovery | None = None
    _tails: dict[int, EventTail] = field(default_factory=dict)

    def update(self, generation: Generation) -> dict[int, RankPage]:
        """Read all pages of ``generation``, pass on what is new as events; the usable pages by rank."""
        pages = {rank.rank: page for rank in generation.ranks if (page := rank.page()) is not None}
        self._relay(generation.ranks)
        self._note_resumed(list(pages.values()))
        for page in pages.values():
            if page.last_step is not None:
                self.furthest = max(page.last_step.step, self.furthest if self.furthest is not None else -1)
            step = page.committed_step
            if step is not None and (self.committed is None or step > self.committed):
                self.committed = step
                self.events.emit("checkpoint_committed", step=step)
        return pages

    def _note_resumed(self, pages: Sequence[RankPage]) -> None:
        stepping = [page for page in pages if page.steps]
        if self.recovery is None or not stepping:
            return
        first = min((page.steps[0] for page in stepping), key=lambda record: record.end)
        previous, noticed = self.recovery.previous_step, self.recovery.noticed
        self.recovery = None
        self.events.emit(
            "resumed",
            step=first.step,
            previous_step=previous,
            lost_steps=0 if previous is None else max(0, previous - first.step + 1),
            recovered_s=round(first.end - noticed, 4),
        )

    def _relay(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            tail = self._tails.setdefault(rank.rank, EventTail(rank_events(rank.page_path)))
            for record in tail.read():
                self._pass_on(rank.rank, record)

    def _pass_on(self, rank: int, record: Mapping[str, object]) -> None:
        t, step = record.get("t"), record.get("step")
        fields = {key: value for key, value in record.items() if key not in _OURS}
        moment = t if isinstance(t, int | float) and math.isfinite(t) else None
        self.events.write(str(record["event"]), moment, {**fields, "rank": rank})
        if record["event"] == "checkpoint_rejected" and isinstance(step, int) and self.committed is not None:
            # It will be committed again.
            self.committed = min(self.committed, step - 1)
