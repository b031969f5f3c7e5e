"""Ranks as the hang judge sees them, which train and hang in virtual time.

Ranks as the hang judge sees them, moved by hand under a made-up clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from opsd.client import PHASES
from opsd.launch.hangs.capture import Frame, Stack, Thread
from opsd.launch.hangs.hang import Hang, HangDetector, Observation
from opsd.launch.hangs.limits import HangLimits
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


# Ranks that train together, report much, little or nothing, and hang, in virtual time.


POLL_S = 1.0
LIMITS = HangLimits()
IN_COLLECTIVE = (("all_reduce", "torch/distributed/distributed_c10d.py"), ("train", "train.py"))
AT_WORK = (("forward", "model.py"), ("train", "train.py"))


@dataclass(frozen=True)
class Reporting:
    """How a program reports: whether it has pages, by whom, and whether they say which phase it is in."""

    source: str | None
    phases: bool


REPORTERS = {
    "nothing": Reporting(None, phases=False),
    "observed": Reporting("observed", phases=False),
    "three lines": Reporting("client", phases=False),
    "adapter": Reporting("adapter", phases=True),
}


class World:
    """Four ranks that train together, the judge, the clock, and the stacks that py-spy would return."""

    def __init__(self, reporting: Reporting, ranks: int = 4, limits: HangLimits = LIMITS) -> None:
        self.now = 1000.0
        self.reporting = reporting
        self.judge = HangDetector(limits)
        self.ranks = [
            FakeRank(
                number, born=self.now, since=self.now, paged=reporting.source is not None,
                source=reporting.source or "client",
            )
            for number in range(ranks)
        ]  # fmt: skip
        self.frames: dict[int, tuple[tuple[str, str], ...]] = {}
        self.moved: set[int] = set()

    def enter(self, rank: int, phase: str, frames: tuple[tuple[str, str], ...], *, idle: bool = False) -> None:
        """A rank begins something; ``phase`` is on its page if the program reports phases."""
        self.frames[rank] = frames
        self.ranks[rank].idle_since = self.now if idle else None
        self.ranks[rank].enter(phase if self.reporting.phases else "other", self.now)

    def pass_time(self, seconds: float) -> Hang | None:
        """Let time pass, until a hang is named."""
        end = self.now + seconds
        while self.now < end:
            self.now += POLL_S
            stall = self.judge.check([rank.observed(self.now) for rank in self.ranks], self.now)
            if stall is not None and stall.due:
                stacks = {rank: stack(frames, moved=rank in self.moved) for rank, frames in self.frames.items()}
                hang = self.judge.verdict(stall, stacks)
                if hang is not None:
                    return hang
        return None

    def named(self, seconds: float) -> int | None:
        """The rank that is named within ``seconds``, None if none is."""
        hang = self.pass_time(seconds)
        return hang.rank if hang else None

    def train(self, steps: int = 10, step_s: float = 1.0) -> None:
        """Complete steps on all ranks together."""
        spent = {"forward": step_s} if self.reporting.phases else {"other": step_s}
        for _ in range(steps):
            for rank in self.ranks:
                self.enter(rank.rank, "forward", AT_WORK)
            assert self.pass_time(step_s) is None
            for rank in self.ranks:
                rank.step(self.now, step_s, **spent)

    def wait_for(self, rank: int) -> None:
        """All others wait for ``rank`` in a collective."""
        for other in self.ranks:
            if other.rank != rank:
                self.enter(other.rank, "collective", IN_COLLECTIVE, idle=True)


def stack(frames: tuple[tuple[str, str], ...], *, moved: bool = False) -> Stack:
    return Stack((Thread("MainThread", True, False, tuple(Frame(name, file, 1) for name, file in frames)),), moved)
