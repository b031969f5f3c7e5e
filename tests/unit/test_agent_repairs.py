"""Repairs in the agent's journal, from the records of `opsd repair`, and how they are shown with the incidents."""

from __future__ import annotations

import gc
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from opsd.agent.journal import Journal
from opsd.agent.repairs import Repairs
from opsd.agent.web.app import App, Request
from opsd.agent.web.node_page import repair_card
from opsd.agent.window import Window
from opsd.collectors.base import Reading, RepairFact, RepairStep
from opsd.collectors.repairs import COLLECTOR, MOST, RepairsCollector
from opsd.repair.case_file import CaseFile
from opsd.repair.repair_plan import RETEST, Case, Remedy, closed
from tests.fakes.agent import Agent
from tests.fakes.clock import eventually
from tests.fakes.incidents import incident

PATIENCE_S = 60.0
OPEN = Case("repair-20260101T000000", "n1", "gpu_xid", "opsd:gpu_xid-1 gpu_xid: Xid 95", 1000.0, first=Remedy.RESET)
RESET = RepairStep("reset_gpus", 1100.0, "boot", 1200.0, True, "done")
FAILED = RepairStep(RETEST, 1200.0, "boot", 1300.0, False, "gpu_health failed")
REBOOT = RepairStep("reboot", 1300.0, "boot", 1400.0, True, "booted again")


def agent(folder: Path) -> Agent:
    """An agent that looks for repairs in its own state folder."""
    source = RepairsCollector(folder / "repair", wall=lambda: 1e10)
    source.interval_s = 0.0
    return Agent(folder, [source], [])


def rows(folder: Path) -> list[tuple[str, str | None, list[str]]]:
    """What the journal has of repairs: id, end, steps."""
    with closing(sqlite3.connect(folder / "journal.db")) as database:
        documents = [
            json.loads(text) for (text,) in database.execute("SELECT document FROM repairs ORDER BY opened_at")
        ]
    return [(d["id"], d["end"], [step["what"] for step in d["attempts"]]) for d in documents]


def test_each_step_of_a_repair_is_in_the_journal_once_also_after_a_restart(tmp_path: Path) -> None:
    """The agent that ended in the middle is followed by another one, and so is that."""
    cases = CaseFile(tmp_path)
    cases.keep(replace(OPEN, attempts=(RESET, replace(FAILED, ok=None))))
    first = agent(tmp_path)
    first.tick()
    first.journal.close(PATIENCE_S)
    assert rows(tmp_path) == [(OPEN.id, None, ["reset_gpus", "retest"])]
    cases.keep(closed(replace(OPEN, attempts=(RESET, FAILED, REBOOT)), "returned", "it passed", 1500.0))
    for _ in range(2):
        later = agent(tmp_path)
        later.tick()
        later.journal.close(PATIENCE_S)
        assert rows(tmp_path) == [(OPEN.id, "returned", ["reset_gpus", "retest", "reboot"])]
        (shown,) = later.loop.snapshot.repairs
        assert (shown.state, [step.ok for step in shown.attempts]) == ("returned", [True, False, True])


def test_a_journal_that_was_lost_is_filled_again(tmp_path: Path) -> None:
    """From the records, while the agent runs and after its end."""
    CaseFile(tmp_path).keep(OPEN)
    running = agent(tmp_path)
    running.tick()
    assert running.journal.flush(PATIENCE_S)
    (tmp_path / "journal.db").unlink()
    running.journal.incident(incident())

    def filled() -> bool:
        running.tick()
        return running.journal.flush(PATIENCE_S) and rows(tmp_path) == [(OPEN.id, None, [])]

    assert eventually(filled)
    running.journal.close(PATIENCE_S)
    (tmp_path / "journal.db").unlink()
    next_one = agent(tmp_path)
    next_one.tick()
    next_one.journal.close(PATIENCE_S)
    assert rows(tmp_path) == [(OPEN.id, None, [])]


def test_a_repair_outlives_its_record_in_the_journal(tmp_path: Path) -> None:
    """Of the folder nothing is left: the end of an ended one is known, and that of another one is not."""
    cases = CaseFile(tmp_path)
    cases.keep(closed(OPEN, "rma", "nothing helped", 1500.0))
    cases.keep(replace(OPEN, id="repair-20260102T000000", opened_at=2000.0))
    first = agent(tmp_path)
    first.tick()
    assert [repair.state for repair in first.loop.snapshot.repairs] == ["rma", "waiting"]
    first.journal.close(PATIENCE_S)
    for path in cases.folder.iterdir():
        path.unlink()
    later = agent(tmp_path)
    later.tick()
    assert [repair.state for repair in later.loop.snapshot.repairs] == ["rma", "unknown"]
    later.journal.close(PATIENCE_S)


def test_a_repair_needs_no_journal_of_the_agent(tmp_path: Path) -> None:
    """A file is where its folder should be: the record is written all the same, and shown."""
    (tmp_path / "journal.db").mkdir()
    CaseFile(tmp_path).keep(replace(OPEN, attempts=(RESET,)))
    blind = agent(tmp_path)
    blind.tick()
    assert blind.loop.snapshot.journal_problem
    assert [step.what for repair in blind.loop.snapshot.repairs for step in repair.attempts] == ["reset_gpus"]
    blind.journal.close(PATIENCE_S)


def test_an_odd_record_of_a_repair_is_left_out_and_the_others_are_read(tmp_path: Path) -> None:
    """As one of an incident: a copy of the journal is kept."""
    notices: list[str] = []
    CaseFile(tmp_path).keep(OPEN)
    first = agent(tmp_path)
    first.tick()
    first.journal.close(PATIENCE_S)
    with closing(sqlite3.connect(tmp_path / "journal.db", isolation_level=None)) as database:
        database.execute("INSERT INTO repairs VALUES ('repair-3', 1.0, '{}'), ('repair-4', 'x', 'y')")
    journal = Journal(tmp_path, notices.append)
    assert [repair.id for repair in journal.open(PATIENCE_S).repairs] == [OPEN.id]
    journal.close(PATIENCE_S)
    assert any("lost 2 records" in notice for notice in notices)


def test_a_journal_of_a_release_without_repairs_is_continued(tmp_path: Path) -> None:
    """Nothing is set aside."""
    first = agent(tmp_path)
    first.journal.incident(incident("old"))
    first.journal.close(PATIENCE_S)
    with closing(sqlite3.connect(tmp_path / "journal.db", isolation_level=None)) as database:
        database.execute("DROP TABLE repairs")
    CaseFile(tmp_path).keep(OPEN)
    later = agent(tmp_path)
    later.tick()
    later.journal.close(PATIENCE_S)
    assert [found.id for found in later.loop.snapshot.incidents] == ["old"]
    assert rows(tmp_path) == [(OPEN.id, None, [])]
    assert not list(tmp_path.glob("journal.db.*-*"))


def test_the_page_and_the_api_have_each_step_in_order(tmp_path: Path) -> None:
    """With its outcome, and how the repair ended."""
    CaseFile(tmp_path).keep(closed(replace(OPEN, attempts=(RESET, FAILED, REBOOT)), "returned", "it passed", 1500.0))
    ticked = agent(tmp_path)
    ticked.tick()
    ticked.journal.close(PATIENCE_S)
    snapshot = ticked.loop.snapshot
    text = str(repair_card(snapshot))
    said = ("reset_gpus done", "retest failed", "reboot done", "returned", "it passed")
    assert sorted(said, key=text.index) == [*said]
    app = App(lambda: snapshot, {}, stale_s=5.0)
    (repair,) = json.loads(app(Request("/api/v1/repairs", {}))[1])["repairs"]
    assert [(step["what"], step["ok"]) for step in repair["steps"]] == [
        ("reset_gpus", True), ("retest", False), ("reboot", True),
    ]  # fmt: skip
    assert json.loads(app(Request(f"/api/v1/repairs/{OPEN.id}", {}))[1]) == repair
    assert json.loads(app(Request("/api/v1/repairs", {"state": ["current"]}))[1]) == {"repairs": []}
    assert [app(Request(f"/api/v1/repairs{odd}", {}))[0] for odd in ("/none", "/../x", "/")] == [404, 404, 200]


def test_the_newest_repair_is_the_first_also_after_the_clock_was_set_back(tmp_path: Path) -> None:
    """Six repairs were begun by a clock that was far ahead; the page shows five."""
    cases = CaseFile(tmp_path)
    for number in range(6):
        ahead = replace(OPEN, id=cases.new_id(1e9 + number), opened_at=1e9 + number, reason=f"opsd:ahead-{number}")
        cases.keep(closed(ahead, "returned", "it passed", 1e9 + number))
    cases.keep(replace(OPEN, id=cases.new_id(1000.0), reason="opsd:now"))
    ticked = agent(tmp_path)
    ticked.tick()
    ticked.journal.close(PATIENCE_S)
    text = str(repair_card(ticked.loop.snapshot))
    assert 0 < text.find("opsd:now") < text.find("opsd:ahead-5")
    assert "opsd:ahead-1" not in text


def test_an_agent_does_not_grow_with_each_repair(tmp_path: Path) -> None:
    """It knows the newest hundred; the journal has more."""
    journal = Journal(tmp_path, lambda _problem: None)
    journal.open(PATIENCE_S)
    repairs, view, numbers = Repairs(journal), Window("n1"), range(3 * MOST)

    def known() -> int:
        return len({id(found) for found in gc.get_objects() if isinstance(found, RepairFact)})

    before = known()
    for number in numbers:
        view.begin(float(number), float(number))
        fact = RepairFact(f"repair-{number:04}", "n1", "gpu_xid", "opsd:x", float(number), (), "returned", number + 1.0)
        view.add(COLLECTOR.name, Reading(facts=(fact,)))
        repairs.take(view)
    assert [repair.id for repair in repairs.shown] == [f"repair-{number:04}" for number in numbers[-MOST:]]
    journal.close(PATIENCE_S)
    assert known() - before <= MOST + 1
    assert len(rows(tmp_path)) == len(numbers)
