"""The page of a job: what is known of it on this node, and the ledger that a process of its own makes."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectors.base import Metric, Sample
from collectors.ranks import MFU
from opsd.agent.ledgers import FRESH_S, REST, Ledgers, Made, make_ledger
from opsd.agent.loop import Snapshot
from opsd.agent.page_cache import PageCache
from opsd.agent.page_history import History
from opsd.agent.page_job import job_page
from tests.fakes.clock import FakeClock, eventually
from tests.fakes.incidents import incident
from tests.unit.test_page import HOSTILE, Structure, rank, run, snapshot

LEDGER = {
    "wall_s": 1000.0,
    "ettr": 0.9,
    "buckets": {"productive": 900.0, "restart": 100.0, "load": 0.0},
    "steps": 1234,
    "generations": 3,
    "finished": False,
    "notes": ["the run has not finished"],
}
MADE = Made(LEDGER)
TOKENS = Metric("opsd_rank_tokens_per_second", "Tokens.", labels=("run", "rank"))


def speeds(run: str, ranks: Sequence[int]) -> tuple[Sample, ...]:
    return tuple(
        sample
        for number in ranks
        for sample in (Sample(TOKENS, 12_500.0, (run, str(number))), Sample(MFU, 0.41, (run, str(number))))
    )


def page(id: str = "4242", made: Made = MADE, **changes: Any) -> bytes | None:
    shown = snapshot(samples=(speeds("train", (0, 1)),), **changes)
    return job_page(shown, History(), lambda _: made, id, "node-17", now=1001.0)


def test_everything_about_a_job_is_on_it() -> None:
    """Speed and MFU, ranks and phases, incidents of this job and no other, and the ledger with its ETTR."""
    found = page(incidents=(incident(job="4242", summary="ours"), incident("b", job="7", summary="of others")))
    assert found is not None
    text = Structure(found).text
    for said in ("job 4242", "25,000", "41.0%", "2 of 8", "ours", "ETTR 90.0%", "productive", "15 min", "1234"):
        assert said in text
    assert "of others" not in text and "load" not in text


def test_a_run_has_it_under_its_name_too() -> None:
    """A run without a job has no other; what is not here has no page."""
    assert page("train") is not None
    assert page("4243") is None and page("") is None
    alone = page("train", runs=[run(job="")], ranks=[rank(0, job="")])
    assert alone is not None and "run train" in Structure(alone).text


def test_without_a_ledger_it_says_why() -> None:
    """The rest of the page is there."""
    found = page(made=Made(None, "events.jsonl: Permission denied"))
    assert found is not None and "No ledger: events.jsonl: Permission denied" in Structure(found).text


def test_what_was_written_into_names_has_no_effect() -> None:
    """Script in names, notes and errors is text."""
    shown = {"runs": [run(HOSTILE, job=HOSTILE)], "ranks": [rank(0, run=HOSTILE, job=HOSTILE)]}
    for made in (Made(None, HOSTILE), Made({**LEDGER, "buckets": {HOSTILE: 1.0}, "notes": [HOSTILE]})):
        found = page(HOSTILE, made=made, **shown)
        assert found is not None
        assert not {tag for tag, _ in Structure(found).tags} & {"script", "img"}


def test_a_ledger_is_made_when_somebody_looks() -> None:
    """Once at a time, and again after a rest that grows with the work."""
    clock, may_end, folders = FakeClock(), threading.Event(), []

    def make(folder: Path) -> Made:
        folders.append(str(folder))
        assert may_end.wait(20)
        clock.advance(10.0)
        return Made(LEDGER)

    ledgers, one, other = Ledgers(make, clock=clock.monotonic), run(folder="/a"), run(folder="/b")
    for _ in range(3):
        assert "being made" in ledgers.of(one).problem and "being made" in ledgers.of(other).problem
    may_end.set()
    assert eventually(lambda: ledgers.of(one).ledger is LEDGER) and folders[0] == "/a"
    assert eventually(lambda: ledgers.of(other).ledger is LEDGER) and len(folders) == 2
    clock.advance(REST * 10.0 - FRESH_S)
    assert ledgers.of(one).ledger is LEDGER and len(folders) == 2
    clock.advance(FRESH_S + 20.0)
    ledgers.of(one)
    assert eventually(lambda: len(folders) == 3)


def test_a_ledger_is_made_from_the_files_of_the_run(tmp_path: Path) -> None:
    """By the command of the same name; a folder that is none is told in its words."""
    assert "is not a run folder" in make_ledger(tmp_path).problem
    events = [{"t": 100.0, "event": "generation_started", "generation": 1}, {"t": 160.0, "event": "finished"}]
    lines = [json.dumps({"generation": 1, "exit_code": 0, **event}) for event in events]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    made = make_ledger(tmp_path)
    assert made.ledger is not None and made.ledger["wall_s"] == 60.0
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(17 << 20)
    assert "opsd ledger" in make_ledger(tmp_path).problem


def test_a_page_is_made_once_a_second() -> None:
    """For everybody who asks for the same one; a newer snapshot or another second makes it anew."""
    pages, first, second = PageCache(), snapshot(), snapshot()
    made = []

    def look(key: str, of: Snapshot, now: float) -> bytes | None:
        def make() -> bytes:
            made.append(key)
            return key.encode()

        return pages.get(key, of, now, make)

    assert [look("a", first, 10.1), look("a", first, 10.9), look("b", first, 10.9)] == [b"a", b"a", b"b"]
    assert made == ["a", "b"]
    look("a", second, 10.9)
    look("a", second, 11.0)
    assert made == ["a", "b", "a", "a"]
