"""Repairs in the agent: its journal, its pages, its series."""

from __future__ import annotations

import gc
import json
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from opsd.agent.journal import Journal
from opsd.agent.repairs import Repairs
from opsd.agent.web.app import App, Request
from opsd.agent.web.node_page import repair_card
from opsd.agent.window import Window
from opsd.collectors.base import NoData, Reading, RepairFact, RepairStep
from opsd.collectors.repairs import COLLECTOR, MOST, OUTCOMES, REMEDIES, RepairsCollector, gpus_renewed_at, read
from opsd.repair.case_file import CaseFile
from opsd.repair.repair_plan import REMEDIES as REMEDIES_OF_A_REPAIR
from opsd.repair.repair_plan import RETEST, Case, Remedy, closed
from tests.fakes.clock import eventually
from tests.fakes.collectors import Agent
from tests.fakes.incidents import incident

# Repairs in the agent's journal, from the records of `opsd repair`, and how they are shown with the incidents.


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


# Repairs of a node as series, from the files of a repair.


OPENED = Case("repair-2", "n1", "gpu_xid", "opsd:gpu_xid-1 gpu_xid: Xid 95", 1000.0, first=Remedy.RESET)


def collector(folder: Path, now: float = 1500.0) -> RepairsCollector:
    return RepairsCollector(folder / "repair", wall=lambda: now)


def series(source: RepairsCollector) -> dict[tuple[str, ...], float]:
    """What is not 0, without the prefix of the names."""
    reading = source.collect()
    assert isinstance(reading, Reading)
    found = {
        (sample.metric.name.removeprefix("opsd_repair_"), *sample.labels): sample.value for sample in reading.samples
    }
    return {key: value for key, value in found.items() if value}


def test_a_node_that_was_never_repaired_has_no_series(tmp_path: Path) -> None:
    """Neither has an agent without a state folder."""
    assert isinstance(collector(tmp_path).collect(), NoData)
    assert isinstance(RepairsCollector(None).collect(), NoData)


def test_an_order_that_nobody_takes_up_grows_old(tmp_path: Path) -> None:
    """Its age is that of the file."""
    CaseFile(tmp_path).order()
    os.utime(tmp_path / "repair/order", (1000.0, 1000.0))
    assert series(collector(tmp_path)) == {("state", "ordered"): 1.0, ("age_seconds",): 500.0}


def test_a_repair_is_followed_from_step_to_step_to_its_end(tmp_path: Path) -> None:
    """By the same collector: the age counts from the first remedy, and ends with the repair."""
    cases, source = CaseFile(tmp_path), collector(tmp_path)
    cases.keep(OPENED)
    assert series(source) == {("state", "waiting"): 1.0, ("age_seconds",): 500.0}
    cases.keep(replace(OPENED, attempts=(RESET, RepairStep(RETEST, 1200.0, "boot"))))
    assert series(source) == {("state", "retest"): 1.0, ("attempts",): 1.0, ("age_seconds",): 400.0}
    cases.keep(closed(replace(OPENED, attempts=(RESET,)), "returned", "", 1300.0))
    assert series(source) == {("state", "returned"): 1.0, ("attempts",): 1.0, ("ended", "returned"): 1.0}


def test_when_the_gpus_were_last_reset_is_known_until_the_next_boot(tmp_path: Path) -> None:
    """From the repair under way and from ended ones; a reset that failed has changed nothing."""
    cases, folder = CaseFile(tmp_path), tmp_path / "repair"
    assert gpus_renewed_at(folder, lambda: "boot") == 0.0
    once = replace(RESET, uptime_s=50.0, took_s=10.0)
    cases.keep(closed(replace(OPENED, id="repair-1", attempts=(once,)), "returned", "", 1300.0))
    assert gpus_renewed_at(folder, lambda: "boot") == 60.0
    again = replace(once, what="reload_driver", uptime_s=500.0)
    cases.keep(
        replace(
            OPENED,
            attempts=(again, replace(once, ok=False, uptime_s=800.0), RepairStep(RETEST, 1.0, "boot")),
        )
    )
    (folder / "repair-0.json").write_text("garbage")
    assert gpus_renewed_at(folder, lambda: "boot") == 510.0
    assert gpus_renewed_at(folder, lambda: "next boot") == 0.0


def test_a_step_of_the_clock_makes_no_repair_old(tmp_path: Path) -> None:
    """Nor young, from its first remedy in this boot on; of an earlier one what the clock said then counts."""
    cases = CaseFile(tmp_path)
    rebooted = RepairStep("reboot", 1300.0, "boot", 2000.0, True, uptime_s=90.0)
    for attempts, resumed_at, age_s in (
        ((replace(RESET, uptime_s=50.0),), 0.0, 120.0),
        ((replace(RESET, boot="before", uptime_s=5000.0), rebooted), 0.0, 200.0 + 80.0),
        ((replace(RESET, boot="before", uptime_s=5000.0),), 0.0, 86_400.0),
        ((replace(RESET, uptime_s=50.0),), 87_100.0, 400.0),
    ):
        cases.keep(replace(OPENED, attempts=attempts, resumed_at=resumed_at))
        source = RepairsCollector(
            tmp_path / "repair", wall=lambda: 1100.0 + 86_400.0, uptime=lambda: 170.0, boot=lambda: "boot"
        )
        assert series(source)["age_seconds",] == age_s


def test_a_paused_repair_has_no_age_and_begins_anew_after_it(tmp_path: Path) -> None:
    """It waits for people, who know."""
    cases, source = CaseFile(tmp_path), collector(tmp_path)
    cases.keep(replace(OPENED, attempts=(RESET,), paused="maintenance: firmware"))
    assert series(source) == {("state", "paused"): 1.0, ("attempts",): 1.0}
    cases.keep(replace(OPENED, attempts=(RESET,), resumed_at=1450.0))
    assert series(source) == {("state", "waiting"): 1.0, ("attempts",): 1.0, ("age_seconds",): 50.0}


def test_the_end_of_the_newest_repair_is_the_state(tmp_path: Path) -> None:
    """The earlier ones are counted."""
    for number, end in enumerate(OUTCOMES):
        CaseFile(tmp_path).keep(closed(replace(OPENED, id=f"repair-{number}"), end, "", 1300.0))
    assert series(collector(tmp_path)) == {("state", "left"): 1.0, **{("ended", end): 1.0 for end in OUTCOMES}}


def test_a_record_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    """Which is no healthy value."""
    CaseFile(tmp_path).keep(OPENED)
    for content in ("", "[]", "{}", '{"attempts": [{}], "opened_at": 1, "end": null}'):
        (tmp_path / "repair/case.json").write_text(content)
        assert series(collector(tmp_path)) == {("state", "unknown"): 1.0}


def test_it_knows_the_remedies_of_a_repair() -> None:
    """It must not import them: the agent has no memory for a repair."""
    assert REMEDIES == REMEDIES_OF_A_REPAIR


def test_a_file_that_is_no_record_of_roots_is_unknown(tmp_path: Path) -> None:
    """A link, a pipe, another user's, and one that is too large or has odd values: the agent reads none of them."""
    cases, current = CaseFile(tmp_path), tmp_path / "repair/case.json"
    cases.keep(OPENED)
    written = current.read_text()

    def pipe() -> None:
        current.unlink()
        os.mkfifo(current)

    oddities = (
        lambda: os.chown(current, 12345, 12345),
        lambda: current.write_text(written + " " * (300 << 10)),
        lambda: current.write_text(written.replace("1000.0", "1e300")),
        lambda: current.write_text(written.replace("1000.0", "NaN")),
        lambda: current.write_text(written.replace("repair-2", "../journal")),
        pipe,
    )
    for make_odd in oddities:
        current.unlink()
        current.write_text(written)
        make_odd()
        known = read(tmp_path / "repair")
        assert known is not None
        assert (known.repairs, known.state) == ((), "unknown")


def test_a_record_of_endless_steps_and_texts_is_taken_in_shortened(tmp_path: Path) -> None:
    """A test that makes way for others again and again is a step each time: the first and the last ones count."""
    steps = (RESET, *[RepairStep(RETEST, float(at), "boot", detail="x" * 5000) for at in range(20)] * 10)
    CaseFile(tmp_path).keep(replace(OPENED, attempts=tuple(replace(s, detail=s.detail[:900]) for s in steps)))
    known = read(tmp_path / "repair")
    assert known is not None
    (repair,) = known.repairs
    assert (len(repair.attempts), repair.attempts[0].what, repair.state) == (MOST, "reset_gpus", "retest")


def test_a_record_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """Of one that lacked who began it, what pauses it, and the uptime."""
    CaseFile(tmp_path).keep(replace(OPENED, attempts=(RESET,)))
    current = tmp_path / "repair/case.json"
    whole = json.loads(current.read_text())
    for name in ("by_hand", "paused", "resumed_at"):
        del whole[name]
    for name in ("uptime_s", "took_s"):
        del whole["attempts"][0][name]
    current.write_text(json.dumps(whole))
    assert series(collector(tmp_path)) == {("state", "waiting"): 1.0, ("attempts",): 1.0, ("age_seconds",): 400.0}
