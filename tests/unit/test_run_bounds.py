"""What a user's folders may cost: entries and bytes of one look, and what of it is remembered."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.collectors.base import Reading
from opsd.collectors.lib.run_slots import SCAN_S, RunSlots
from opsd.collectors.lib.run_watch import ENTRIES, EVENT_BYTES
from opsd.collectors.ranks import KEPT_BYTES, LEFT_OUT, RanksCollector
from tests.fakes.run_folder import Clock, read, write_run


class Crawling:
    """A clock on which each part of a look takes half of its time."""

    now = 0.0

    def __call__(self) -> float:
        self.now += SCAN_S / 2
        return self.now


@pytest.fixture
def shm() -> Iterator[Path]:
    """The root of runs in memory, where thousands of files are made in no time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="opsd-bounds-", dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def left_out(reading: Reading) -> dict[str, float]:
    return {sample.labels[0]: sample.value for sample in reading.samples if sample.metric is LEFT_OUT}


def pages(run: Path, count: int) -> None:
    """So many ranks that have files."""
    run.mkdir()
    for number in range(count):
        (run / f"rank-{10_000 + number}.page").touch()


def looked_at(shm: Path) -> float:
    """The ranks of which a collector has found files: those that it looks at and those that it leaves out."""
    collector = RanksCollector(shm, clock=Clock())
    reading = read(collector)
    errors = sum(sample.value for sample in reading.samples if sample.metric.name == "opsd_rank_page_errors")
    return errors + left_out(reading)["ranks"]


def test_the_root_is_read_a_part_at_a_time(shm: Path) -> None:
    """However many entries it has a look takes its time and no more; the next one goes on there."""
    for number in range(40):
        (shm / f"run-{number}").mkdir()
    for number in range(400):
        (shm / f"file-{number}").touch()
    slots = RunSlots(shm, lambda *_: True, clock=Crawling())
    found = [len(slots.look()) for _ in range(8)]
    assert found[0] < 40 and found[-1] == 40


def test_of_a_run_folder_so_many_entries_are_read(shm: Path) -> None:
    """Further ones are not even counted."""
    pages(shm / "r1", ENTRIES + 500)
    assert looked_at(shm) == ENTRIES


def test_a_user_with_many_runs_has_as_many_entries_read(shm: Path) -> None:
    """As one with a single run."""
    for run in range(4):
        pages(shm / f"r{run}", ENTRIES // 4 + 500)
    assert looked_at(shm) == ENTRIES


def test_a_user_with_many_runs_has_as_many_events_read(shm: Path) -> None:
    """In one look, however long the files are."""
    for number in range(8):
        run = shm / f"r{number}"
        run.mkdir()
        write_run(run, os.getpid())
        line = json.dumps({"t": 1.0, "event": "resumed", "filler": "x" * 4096}) + "\n"
        (run / "events.jsonl").write_text(line * (2 * EVENT_BYTES // 8 // len(line)))
    collector = RanksCollector(shm, clock=Clock())
    assert sum(event.size for event in read(collector).events) <= EVENT_BYTES


def test_what_is_remembered_of_events_has_an_end(shm: Path) -> None:
    """The rest is left out, which a metric and the state of the collector say."""
    run = shm / "r1"
    run.mkdir()
    write_run(run, os.getpid())
    line = json.dumps({"t": 1.0, "event": "resumed", "filler": "x" * (100 << 10)}) + "\n"
    collector, kept = RanksCollector(shm, clock=Clock()), 0
    for _ in range(2 * KEPT_BYTES // len(line)):
        with (run / "events.jsonl").open("a") as file:
            file.write(line)
        reading = read(collector)
        kept += sum(event.size for event in reading.events)
    assert 0 < kept <= KEPT_BYTES
    assert left_out(reading)["events"] == 1
    assert "events left out" in reading.limited
