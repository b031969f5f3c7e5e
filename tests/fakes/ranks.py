"""Ranks as the hang judge sees them, moved by hand under a made-up clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from opsd.client import PHASES
from opsd.launch.hangs.hang import Observation
from opsd.rank_page import RankPage, StepRecord


@dataclass
class FakeRank:
    """One rank; times in seconds of the test's clock. Steps are numbered from 0."""

    rank: int
    born: float = 0.0
    process: str | None = "S"
    phase: str = "setup"
    since: float = 0.0
    state: str = "running"
    source: str = "client"
    paged: bool = True
    idle_since: float | None = None
    writing: bool = False
    records: list[StepRecord] = field(default_factory=list)

    def enter(self, phase: str, now: float) -> None:
        """Change the phase."""
        self.phase, self.since = phase, now

    def step(self, now: float, duration_s: float, **phase_s: float) -> None:
        """Complete a step that took ``duration_s``, with the given seconds in the phases named."""
        spent = tuple(phase_s.get(name, 0.0) for name in PHASES)
        self.records.append(StepRecord(len(self.records), now, duration_s, 1, 0.0, 0.0, spent))
        self.enter("other", now)

    def observed(self, now: float) -> Observation:
        """The rank as the launcher sees it at ``now``; at work unless it is idle since some second."""
        active = now if self.idle_since is None else self.idle_since
        return Observation(self.rank, self.page if self.paged else None, self.process, active, now, self.writing)

    @property
    def page(self) -> RankPage:
        """The rank's page as a reader would get it."""
        return RankPage(
            rank=self.rank, local_rank=self.rank, world_size=8, generation=1, gpu=None, pid=1000, pid_start=1,
            node="node", job="", run="run", created_wall=self.born, created=self.born, state=self.state,
            phase=self.phase, phase_since=self.since, steps_reported=len(self.records), committed_step=None, tokens=0,
            request="none", flops_per_token=None, peak_flops=None, workers=(), steps=tuple(self.records[-63:]),
            source=self.source,
        )  # fmt: skip
