"""Collectors whose outcome a test decides, and an agent made of the real parts.

Collectors whose outcome a test decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from opsd.agent.actions import Commenter, Drainer, Executor, Notifier, PowerLimiter
from opsd.agent.incident_manager import Announce, IncidentManager, Listener
from opsd.agent.journal import Journal
from opsd.agent.judge import Judge
from opsd.agent.logs import Log
from opsd.agent.loop import Clock, Loop
from opsd.agent.window import Window
from opsd.collectors.base import Collector, Metric, NoData, Reading, Sample
from opsd.runbooks.base import Runbook
from opsd.settings.policy import PolicySettings
from tests.fakes.clock import FakeClock

VALUE = Metric("opsd_fake_value", "A value that a test sets.", labels=("source",))


class FakeCollector:
    """Delivers what ``answer`` returns, or raises what it raises."""

    metrics = (VALUE,)
    interval_s = 0.0

    def __init__(self, name: str, answer: Callable[[], Reading | NoData] | None = None) -> None:
        self.name = name
        self.calls = 0
        self.answer = answer or (lambda: Reading((Sample(VALUE, float(self.calls), (name,)),)))

    def collect(self) -> Reading | NoData:
        self.calls += 1
        return self.answer()


class HangingCollector(FakeCollector):
    """Does not return until ``release`` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.release = threading.Event()

    def collect(self) -> Reading | NoData:
        self.calls += 1
        self.release.wait(60)
        return self.answer()


# An agent made of the real parts, around collectors and runbooks of a test and under its clock.


SILENT = Log(lambda event: None)


def runbook(**changes: object) -> Runbook:
    """A runbook for incidents of kind "trouble" that finds nothing unless told to."""
    fields = {"kind": "trouble", "detect": lambda _view: (), "healed": lambda _incident, _view: None}
    return Runbook(**{**fields, "needs": ("source",), "max_attempts": 2, **changes})


class Agent:
    """A loop and its parts; ``tick`` lets a second pass. It waits for its collectors for half of ``interval_s``.

    All collectors read the kernel or a driver unless ``witnesses`` names those that do.
    """

    def __init__(
        self,
        folder: Path,
        collectors: Sequence[Collector],
        runbooks: Sequence[Runbook],
        *,
        mode: str = "act",
        limits: PolicySettings = PolicySettings(cooldown_s=0, drain=True),  # noqa: B008
        shm: Path | None = None,
        notify: Notifier | None = None,
        set_power_limit: PowerLimiter | None = None,
        drain_node: Drainer | None = None,
        comment_job: Commenter | None = None,
        listeners: Sequence[Listener] = (),
        announce: Announce = lambda _incident, _news: None,
        clock: FakeClock | None = None,
        interval_s: float = 40.0,
        deadline_s: float = 2.0,
        witnesses: Sequence[str] | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.told: list[str] = []
        self.journal = Journal(folder, lambda problem: None, retry_s=0.05, wall=self.clock.wall)
        self.executor = Executor(
            shm=shm or folder,
            notify=notify or (lambda text, fields: self.told.append(text)),
            set_power_limit=set_power_limit,
            drain_node=drain_node,
            comment_job=comment_job,
        )
        judge = Judge(runbooks, SILENT, used_s=lambda: 0.0)
        self.incident_manager = IncidentManager(
            judge, self.executor, self.journal, SILENT,
            policy=limits.model_copy(update={"mode": mode}), started_at=self.clock.wall(), listeners=listeners,
            announce=announce,
        )  # fmt: skip
        window = Window("node", seconds=60, witnesses=[c.name for c in collectors] if witnesses is None else witnesses)
        clocks = Clock(self.clock.monotonic, self.clock.wall)
        self.loop = Loop(
            window, collectors, judge, self.incident_manager, self.journal, SILENT,
            interval_s=interval_s, deadline_s=deadline_s, clock=clocks,
        )  # fmt: skip

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.advance(1.0)
            self.loop.tick()

    def metrics(self) -> dict[str, float]:
        """Every series of the snapshot by its text."""
        return {
            f"{metric.name}{{{','.join(labels)}}}": value
            for group in self.loop.snapshot.samples
            for metric, value, labels in group
        }
