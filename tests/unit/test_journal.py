"""The journal: nothing is lost over a restart, and no state of the disk stops the agent."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from opsd.agent.incidents import Transition
from opsd.agent.journal import MAX_BACKLOG, Journal
from opsd.agent.policy import PastAction
from opsd.agent.store import (
    KEEP_INCIDENTS,
    KEEP_ROWS,
    KEEP_S,
    MAX_ACTIONS,
    MAX_CURRENT,
    MAX_ENDED,
    InUseError,
    JournalContent,
    from_json,
    open_file,
    to_json,
)
from opsd.runbooks.base import State
from tests.fakes.clock import eventually
from tests.fakes.incidents import incident

PATIENCE_S = 60.0
FULL = 2
"""SQLite waits for the disk after each transaction."""


class Log(list[str]):
    """The problems that a journal has told of, in order; "" means that it is well again."""

    def __call__(self, problem: str) -> None:
        self.append(problem)


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_document_is_the_incident() -> None:
    """Everything about an incident survives being written."""
    assert from_json(to_json(incident())) == incident()


def test_an_agent_that_is_restarted_knows_what_it_knew(tmp_path: Path, log: Log) -> None:
    """Current incidents keep their id, ended ones their end, and the policy its history."""
    over = incident("b", state=State.RESOLVED, resolved_at=time.time())
    past = PastAction("trouble", "kill_process", "r", time.time(), user=1001)
    journal = Journal(tmp_path / "state", log)
    assert journal.open(PATIENCE_S) == JournalContent()
    journal.incident(incident("a"))
    journal.incident(over)
    journal.incident(incident("a", attempts=1))
    journal.transition(Transition("a", "trouble", None, State.OPEN, 1.0, "opened"))
    journal.action("a", past)
    journal.close(PATIENCE_S)
    assert Journal(tmp_path / "state", log).open(PATIENCE_S) == JournalContent(
        (incident("a", attempts=1),), (over,), (past,)
    )
    assert log == ["", ""]
    assert not (tmp_path / "state").stat().st_mode & 0o077


def test_what_is_written_is_on_the_disk_and_not_in_its_cache(tmp_path: Path) -> None:
    """An intention must survive the node that loses its power, as the action may be its last."""
    with closing(open_file(tmp_path / "journal.db", time.time())) as database:
        ((synchronous,),) = database.execute("PRAGMA synchronous").fetchall()
    assert synchronous == FULL


def test_a_journal_on_a_full_disk_keeps_its_records_until_there_is_room(small_disk: Path, log: Log) -> None:
    """The problem is told once, the backlog waits in memory, and is written when the disk is back."""
    journal = Journal(small_disk, log, retry_s=0.05)
    journal.open(PATIENCE_S)
    assert eventually(lambda: log == [""])
    ballast = small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    for number in range(50):
        journal.incident(incident(f"i{number}", summary="s" * 2000))
    assert eventually(lambda: bool(journal.problem))
    assert "disk" in journal.problem
    assert not journal.flush(0.2)
    assert len(log) == 2
    ballast.unlink()
    assert journal.flush(PATIENCE_S)
    assert log[2:] == [""]
    journal.close(PATIENCE_S)
    assert len(Journal(small_disk, log).open(PATIENCE_S).current) == 50


def test_a_journal_on_a_read_only_disk_keeps_its_records_until_it_can_be_written(small_disk: Path, log: Log) -> None:
    """A file system that the kernel has made read-only after an error is the usual way for a disk to die."""
    journal = Journal(small_disk / "state", log, retry_s=0.05)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert journal.open(PATIENCE_S) == JournalContent()
    journal.incident(incident())
    assert eventually(lambda: "Read-only file system" in journal.problem)
    assert journal.backlog == 1
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert journal.flush(PATIENCE_S)
    journal.close(PATIENCE_S)


def test_a_disk_that_hangs_is_a_problem_until_it_goes_on(tmp_path: Path, log: Log) -> None:
    """Or actions would be begun again and again, each to wait for its record in vain."""
    journal = Journal(tmp_path, log, slow_s=0.05, retry_s=0.05)
    journal.open(PATIENCE_S)
    assert journal.problem == ""
    with closing(sqlite3.connect(journal.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        journal.incident(incident())
        assert eventually(lambda: "the disk hangs or is slow" in journal.problem)
        other.execute("ROLLBACK")
    assert journal.flush(PATIENCE_S)
    assert eventually(lambda: not journal.problem)
    journal.close(PATIENCE_S)


def test_a_state_folder_that_cannot_be_made_is_a_problem_and_not_the_end(tmp_path: Path, log: Log) -> None:
    """A file in the way; once it is gone the journal begins."""
    (tmp_path / "state").write_text("in the way")
    journal = Journal(tmp_path / "state", log, retry_s=0.05)
    assert journal.open(PATIENCE_S) == JournalContent()
    journal.incident(incident())
    assert eventually(lambda: "cannot be written" in journal.problem)
    (tmp_path / "state").unlink()
    assert journal.flush(PATIENCE_S)
    assert log[-1] == ""


@pytest.mark.parametrize("damage", [b"not a database at all" * 100, None])
def test_a_damaged_journal_is_set_aside(tmp_path: Path, log: Log, damage: bytes | None) -> None:
    """It is kept under another name for a person to look at, and a new one is begun."""
    journal = Journal(tmp_path, log)
    journal.open(PATIENCE_S)
    for number in range(200):
        journal.incident(incident(f"i{number}"))
    journal.close(PATIENCE_S)
    content = journal.path.read_bytes()
    journal.path.write_bytes(damage or content[:8192] + os.urandom(8192) + content[16384:])
    second = Journal(tmp_path, log)
    second.open(PATIENCE_S)
    second.incident(incident())
    assert second.flush(PATIENCE_S)
    assert any("set aside" in problem for problem in log)
    assert len(list(tmp_path.glob("journal.db.damaged-*"))) == 1
    second.close(PATIENCE_S)


def test_two_agents_do_not_share_a_journal(tmp_path: Path, log: Log) -> None:
    """Without its memory the second one would open each incident again: it does not begin, and says who has it."""
    first = Journal(tmp_path, log)
    first.open(PATIENCE_S)
    second = Journal(tmp_path, Log(), retry_s=0.05)
    with pytest.raises(InUseError, match=rf"in use by another agent \(process {os.getpid()}\)"):
        second.open(PATIENCE_S)
    first.close(PATIENCE_S)
    third = Journal(tmp_path, log)
    assert third.open(PATIENCE_S) == JournalContent()
    third.close(PATIENCE_S)


def test_an_agent_that_ends_in_a_second_is_waited_for(tmp_path: Path, log: Log) -> None:
    """The one that was told to stop may still write its last second."""
    first = Journal(tmp_path, log)
    first.open(PATIENCE_S)
    first.incident(incident())
    threading.Timer(0.2, first.close).start()
    second = Journal(tmp_path, log)
    assert [found.id for found in second.open(PATIENCE_S).current] == [incident().id]
    second.close(PATIENCE_S)


def test_the_backlog_is_bounded(tmp_path: Path, log: Log) -> None:
    """A disk that never comes back costs the oldest records and not the memory; what is lost is counted."""
    (tmp_path / "state").write_text("in the way")
    journal = Journal(tmp_path / "state", log)
    journal.open(PATIENCE_S)
    for number in range(MAX_BACKLOG + 7):
        journal.transition(Transition("a", "trouble", None, State.OPEN, float(number), ""))
    assert (journal.backlog, journal.lost) == (MAX_BACKLOG, 7)


def test_a_journal_with_too_much_is_read_and_kept_in_part(tmp_path: Path, log: Log) -> None:
    """A million actions took 150 MB and seconds at the start; notifications are not of the policy's history."""
    first = Journal(tmp_path, log)
    first.open(PATIENCE_S)
    first.close(PATIENCE_S)
    now, over = time.time(), incident("b", state=State.RESOLVED, resolved_at=time.time())
    current, ended = to_json(incident("a")), to_json(over)
    with closing(sqlite3.connect(tmp_path / "journal.db", isolation_level=None)) as database:
        database.execute("BEGIN")
        insert = "INSERT INTO incidents VALUES (?, 'trouble', 'k', 'open', ?, ?, ?)"
        rows = ((f"{n:05d}", now - n / 10, now if n % 2 else None, "") for n in range(2 * KEEP_INCIDENTS + 4000))
        database.executemany(insert, rows)
        database.execute("UPDATE incidents SET document = replace(?, '\"a\"', '\"' || id || '\"')", (current,))
        document = "replace(?, '\"b\"', '\"' || id || '\"')"
        database.execute(f"UPDATE incidents SET document = {document} WHERE resolved_at IS NOT NULL", (ended,))
        insert = "INSERT INTO actions (incident, at, kind, verb, target) VALUES ('a', ?, 'trouble', ?, 't')"
        database.executemany(insert, ((now - 60, "notify" if n % 2 else "drain_node") for n in range(KEEP_ROWS + 500)))
        database.execute("COMMIT")
    found = Journal(tmp_path, log).open(PATIENCE_S)
    assert (len(found.current), len(found.ended)) == (MAX_CURRENT, MAX_ENDED)
    assert (len(found.actions), {past.verb for past in found.actions}) == (MAX_ACTIONS // 2, {"drain_node"})
    assert found.current[-1].id == "00000"
    with closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        counts = [database.execute(f"SELECT count(*) FROM {table}").fetchone() for table in ("incidents", "actions")]
    assert counts == [(KEEP_INCIDENTS + MAX_CURRENT,), (KEEP_ROWS,)]
    assert log[-1] == ""


@pytest.mark.parametrize("year", [-1, 1])
def test_a_clock_that_is_wrong_by_a_year_takes_no_history_away(tmp_path: Path, log: Log, year: int) -> None:
    """As after a boot with an empty clock battery; what was long before the newest incident is forgotten as ever."""
    now = time.time()
    first = Journal(tmp_path, log)
    first.open(PATIENCE_S)
    for id, at in (("old", now - KEEP_S - 90), ("recent", now - 60)):
        first.incident(incident(id, state=State.RESOLVED, opened_at=at, last_seen_at=at, resolved_at=at + 1))
    first.close(PATIENCE_S)
    journal = Journal(tmp_path, log, wall=lambda: now + year * 365 * 86_400)
    assert "recent" in {found.id for found in journal.open(PATIENCE_S).ended}
    journal.close(PATIENCE_S)
    again = Journal(tmp_path, log)
    assert [found.id for found in again.open(PATIENCE_S).ended] == ["recent"]
    again.close(PATIENCE_S)


def test_closing_writes_what_is_left(tmp_path: Path, log: Log) -> None:
    """An agent that is told to stop loses nothing of its last second."""
    journal = Journal(tmp_path, log)
    journal.open(PATIENCE_S)
    for number in range(300):
        journal.incident(incident(f"i{number}"))
    journal.close(PATIENCE_S)
    assert len(Journal(tmp_path, log).open(PATIENCE_S).current) == 300
