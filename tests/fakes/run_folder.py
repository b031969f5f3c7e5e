"""The shared-memory folder of a run with real rank pages, and what the ranks collector makes of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

from opsd import client
from opsd.client import Reporter
from opsd.collectors.base import RankFact, Reading, RunFact
from opsd.collectors.ranks import RanksCollector


class Clock:
    """Monotonic time that stands still until it is moved."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


def reporter(run: Path, rank: int = 0, **identity: object) -> Reporter:
    """A rank page in the folder of a run."""
    return Reporter(run / f"rank-{rank:04d}.page", rank=rank, local_rank=rank, **identity)  # type: ignore[arg-type]


def write_run(run: Path, pid: int, **changes: object) -> None:
    """What the launcher with this process id writes about the run."""
    content = {
        "run": "r1", "job": "4242", "node": "n1", "state": "running", "generation": 2, "launcher_pid": pid,
        "launcher_start": client.process_start(pid), "world_size": 8, "control": f"{run}/control.sock", "folder": "/r",
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(content | changes))


def read(collector: RanksCollector) -> Reading:
    """One collection, which must not be an absence."""
    reading = collector.collect()
    assert isinstance(reading, Reading)
    return reading


def values(reading: Reading) -> dict[tuple[str, ...], float]:
    """The series of a reading by name and label values."""
    return {(s.metric.name, *s.labels): s.value for s in reading.samples}


def ranks(reading: Reading) -> list[RankFact]:
    """The ranks of a reading."""
    return [fact for fact in reading.facts if isinstance(fact, RankFact)]


def runs(reading: Reading) -> list[RunFact]:
    """The runs of a reading."""
    return [fact for fact in reading.facts if isinstance(fact, RunFact)]
