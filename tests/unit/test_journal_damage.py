"""Journals that hold what opsd never wrote: the agent runs, says so in one sentence, and keeps the file."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.agent.incidents import Transition
from opsd.agent.journal import IncidentCopy, Journal
from opsd.agent.policy import PastAction
from opsd.agent.store import SCHEMA_VERSION, JournalContent, to_document
from opsd.runbooks.base import Closing, Cost, State
from tests.fakes.clock import until
from tests.fakes.incidents import WALL, incident
from tests.fakes.process import stuck_agent

PATIENCE_S = 60.0


class Log(list[str]):
    """What a journal has told of, in order."""

    def __call__(self, problem: str) -> None:
        self.append(problem)

    @property
    def sentences(self) -> list[str]:
        return [*filter(None, self)]


def keep(folder: Path, *ids: str, at: float | None = None) -> None:
    """A journal of these incidents, with one action each."""
    journal = Journal(folder, lambda _problem: None)
    journal.open(PATIENCE_S)
    for id in ids:
        journal.incident(incident(id))
        journal.action(id, PastAction("trouble", "kill_process", id, time.time() if at is None else at))
    journal.close(PATIENCE_S)


def execute(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / "journal.db", isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def opened(folder: Path, log: Log) -> JournalContent:
    """What a new agent reads, which must be able to write as well."""
    journal = Journal(folder, log, retry_s=0.05)
    content = journal.open(PATIENCE_S)
    journal.incident(incident("later"))
    assert journal.flush(PATIENCE_S), journal.problem
    journal.close(PATIENCE_S)
    return content


DOCUMENT = to_document(incident("odd"))
ODD_DOCUMENTS = [
    "", "null", "[]", "{}", "nonsense", '"' * 9, "[" * 100_000,
    json.dumps(DOCUMENT | {"opened_at": "yesterday"}),
    json.dumps(DOCUMENT | {"opened_at": None}),
    json.dumps(DOCUMENT | {"opened_at": float("nan")}),
    json.dumps(DOCUMENT | {"acted_at": float("inf")}),
    json.dumps(DOCUMENT | {"attempts": "three"}),
    json.dumps(DOCUMENT | {"state": "asleep"}),
    json.dumps(DOCUMENT | {"evidence": [{"text": 1, "source": 2, "at": "x"}]}),
    json.dumps(DOCUMENT | {"evidence": "too hot"}),
    json.dumps(DOCUMENT | {"actions": [17]}),
    json.dumps(DOCUMENT | {"resolved_at": 1.0}),
    json.dumps(DOCUMENT | {"id": "another"}),
    json.dumps({key: value for key, value in DOCUMENT.items() if key != "culprit"}),
]  # fmt: skip


@pytest.mark.parametrize("document", ODD_DOCUMENTS, ids=range(len(ODD_DOCUMENTS)))
def test_an_odd_incident_is_left_out_and_kept(tmp_path: Path, document: str) -> None:
    """It is known from the copy of the incidents, that of the journal keeps the record, and it is said once."""
    keep(tmp_path, "good", "odd")
    with closing(sqlite3.connect(tmp_path / "journal.db", isolation_level=None)) as database:
        database.execute("UPDATE incidents SET document = ? WHERE id = 'odd'", (document,))
    log = Log()
    assert opened(tmp_path, log).current == (incident("good"), incident("odd"))
    (aside,) = tmp_path.glob("journal.db.odd-*")
    assert log.sentences == [
        f"{tmp_path / 'journal.db'} has lost 1 record that cannot be read; a copy of all is {aside.name}"
    ]
    with closing(sqlite3.connect(aside)) as database:
        assert database.execute("SELECT document FROM incidents WHERE id = 'odd'").fetchone() == (document,)
    again = Log()
    assert {i.id for i in opened(tmp_path, again).current} == {"good", "odd", "later"}
    assert again.sentences == []


@pytest.mark.parametrize("values", ["at = 'noon'", "at = x'00ff'", "target = x'ff'", "at = 9e999"])
def test_an_odd_action_is_left_out_and_kept(tmp_path: Path, values: str) -> None:
    """An agent that took it in would fail at the next decision."""
    keep(tmp_path, "good", "odd")
    execute(tmp_path, f"UPDATE actions SET {values} WHERE incident = 'odd'")
    log = Log()
    assert [past.target for past in opened(tmp_path, log).actions] == ["good"]
    assert "lost 1 record that cannot be read" in log.sentences[0]


def test_text_that_is_not_utf_8_stops_no_journal(tmp_path: Path) -> None:
    """SQLite hands it out as an error of the whole query."""
    keep(tmp_path, "good", "odd")
    execute(tmp_path, "UPDATE actions SET verb = CAST(x'fffe' AS TEXT) WHERE incident = 'odd'")
    assert len(opened(tmp_path, Log()).current) == 2


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        ([f"PRAGMA user_version = {SCHEMA_VERSION + 1}"], f"was written by a newer opsd (schema {SCHEMA_VERSION + 1})"),
        (["PRAGMA user_version = 0"], "was written by an older opsd (schema 0)"),
        (["PRAGMA user_version = -3"], "was written by an older opsd (schema -3)"),
        (["DROP TABLE actions"], "has other tables than opsd's"),
        (["ALTER TABLE actions DROP COLUMN verb"], "has other tables than opsd's"),
        (["ALTER TABLE incidents ADD COLUMN colour TEXT NOT NULL DEFAULT ''"], "has other tables than opsd's"),
    ],
)
def test_a_journal_of_another_schema_is_set_aside(tmp_path: Path, statements: list[str], said: str) -> None:
    """It is kept whole under another name, and the agent has a new one; no incident is opened a second time."""
    keep(tmp_path, "a")
    execute(tmp_path, *statements)
    log = Log()
    assert opened(tmp_path, log) == JournalContent(current=(incident("a"),))
    (aside,) = tmp_path.glob("journal.db.*-2*")
    assert log.sentences == [
        f"{tmp_path / 'journal.db'} {said}; it was set aside as {aside.name} and a new one was created"
    ]
    with closing(sqlite3.connect(aside)) as database:
        assert database.execute("SELECT id FROM incidents").fetchone() == ("a",)


def test_what_is_set_aside_overwrites_nothing(tmp_path: Path) -> None:
    """Not even twice in a second; and only a few are kept, so that a disk cannot fill."""
    for _ in range(8):
        (tmp_path / "journal.db").write_bytes(b"not a database at all" * 100)
        opened(tmp_path, Log())
    assert len(list(tmp_path.glob("journal.db.damaged-*"))) == 5


def test_no_value_of_a_record_ends_the_journal(tmp_path: Path) -> None:
    """What users name (runs, targets) is any bytes; a record that SQLite refuses is counted and the others are kept."""
    log = Log()
    journal = Journal(tmp_path, log, retry_s=0.05)
    journal.open(PATIENCE_S)
    journal.incident(incident("surrogate", key="\udcff", summary="run \udcff"))
    journal.transition(Transition("surrogate", "trouble", None, State.OPEN, 1.0, "run \udcff\0"))
    journal.transition(Transition("nan", "trouble", None, State.OPEN, float("nan"), ""))
    journal.incident(incident("nan", opened_at=float("nan")))
    journal.incident(incident("keys", data={("a", "b"): 1}))
    journal.incident(incident("cost", cost=Cost(gpu_seconds=float("inf"))))
    past = PastAction("trouble", "kill_process", "\udcff", time.time())
    assert journal.action("surrogate", past).wait(PATIENCE_S)
    assert not journal.action("huge", PastAction("trouble", "kill_process", "r", 1 << 70)).wait(PATIENCE_S)
    assert not journal.action("nan", PastAction("trouble", "kill_process", "r", float("nan"))).wait(PATIENCE_S)
    assert journal.flush(PATIENCE_S)
    assert (journal.problem, journal.lost) == ("", 5)
    journal.close(PATIENCE_S)
    content = Journal(tmp_path, log).open(PATIENCE_S)
    assert [i.id for i in content.current] == ["surrogate", "cost"]
    assert len(content.actions) == 1


def test_a_bug_in_the_journal_is_a_problem_and_not_its_end(tmp_path: Path) -> None:
    """The thread that writes goes on, and what it could not do is said."""
    calls = threading.Event()

    def fails_once(problem: str) -> None:
        if not calls.is_set():
            calls.set()
            raise ZeroDivisionError(problem)

    journal = Journal(tmp_path, fails_once, retry_s=0.05)
    journal.open(PATIENCE_S)
    journal.incident(incident())
    assert journal.flush(PATIENCE_S)
    assert until(calls.is_set)
    journal.close(PATIENCE_S)


def test_times_to_come_are_those_of_now(tmp_path: Path) -> None:
    """A clock that was years ahead at the last start must not keep the agent from acting until then."""
    now = time.time()
    keep(tmp_path, "a", at=now + 1e9)
    (past,) = opened(tmp_path, Log()).actions
    assert past.at <= time.time()


def test_what_a_late_journal_remembers_is_taken_in(tmp_path: Path) -> None:
    """An earlier agent could not be ended, as one that waits for a disk; what it did counts as soon as it is read."""
    keep(tmp_path, "r")
    memory = tmp_path / "memory"
    memory.mkdir()
    IncidentCopy(memory).save([incident("copied")])
    with stuck_agent(tmp_path) as earlier:
        second = Journal(tmp_path, Log(), retry_s=0.05, memory=memory)
        assert second.open(PATIENCE_S) == JournalContent(current=(incident("copied"),))
        assert f"in use by another agent (process {earlier})" in second.problem
        assert second.remembered() is None
    content = until(second.remembered)
    assert content is not None
    assert [past.target for past in content.actions] == ["r"]
    assert second.remembered() is None
    second.close(PATIENCE_S)


@pytest.mark.parametrize("damage", ["names", "middle", "all"])
def test_a_current_incident_outlives_its_journal(tmp_path: Path, damage: str) -> None:
    """It would be opened, and paged, a second time. What can be read of the journal is read, be it in two halves."""
    ids = [f"i{number:04d}" for number in range(400)]
    keep(tmp_path, *ids)
    path = tmp_path / "journal.db"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek({"names": 4096, "middle": size // 8192 * 4096, "all": 0}[damage])
        file.write(b"\xff" * (size if damage == "all" else 4096))
    log = Log()
    content = opened(tmp_path, log)
    assert {found.id for found in content.current} >= {*ids[-256:]}
    if damage in {"names", "middle"}:
        assert any("records of it that can be read" in said for said in log)
        assert len(content.actions) > 100


def test_what_a_full_disk_has_not_taken_is_in_memory(small_disk: Path, tmp_path: Path) -> None:
    """The agent is killed meanwhile; the next one knows what is open, what is over, and whom it has told."""
    keep(small_disk, "early", "told")
    journal = Journal(small_disk, Log(), retry_s=0.05, memory=tmp_path)
    early, told = journal.open(PATIENCE_S).current
    with pytest.raises(OSError, match="No space"), (small_disk / "filler").open("wb") as file:
        while True:
            file.write(b"x" * 65536)
    over = replace(early, state=State.RESOLVED, resolved_at=early.last_seen_at + 5)
    told = replace(
        told,
        last_seen_at=told.last_seen_at + 5,
        actions=(
            {"verb": "notify", "target": "webhook", "args": {}, "reason": "", "at": 1.0, "outcome": "ok", "detail": ""},
        ),
    )
    for one in (over, told, incident("late", opened_at=early.opened_at + 5)):
        journal.incident(one)
    journal.copy()
    assert until(lambda: journal.problem)
    shutil.copytree(small_disk, tmp_path / "killed")
    for memory in (tmp_path, None):  # what is read from memory is in the next journal
        again = Journal(tmp_path / "killed", Log(), memory=memory)
        content = again.open(PATIENCE_S)
        assert {found.id: found.actions for found in content.current}["told"] == told.actions
        assert ({found.id for found in content.current}, [found.id for found in content.ended]) == (
            {"told", "late"}, ["early"],
        )  # fmt: skip
        again.close(PATIENCE_S)
    journal.close(PATIENCE_S)


def test_what_a_person_has_closed_outlives_a_journal_from_a_backup(tmp_path: Path) -> None:
    """Its evidence is read again from where the restored folder ends; it would open, and page, a second time."""
    memory, folder, backup = tmp_path / "memory", tmp_path / "state", tmp_path / "backup"
    memory.mkdir()
    keep(folder, "before")
    shutil.copytree(folder, backup)
    closed = replace(
        incident("closed"), state=State.RESOLVED, resolved_at=WALL + 9, closed=Closing("ann", WALL + 9, "known")
    )
    for number in range(3):  # the folder is restored after two starts
        if number == 2:
            shutil.rmtree(folder)
            shutil.copytree(backup, folder)
        journal = Journal(folder, Log(), memory=memory)
        content = journal.open(PATIENCE_S)
        assert [found.id for found in content.ended] == (["closed"] if number else [])
        if not number:
            journal.incident(closed)
        journal.copy()
        journal.close(PATIENCE_S)


def test_a_journal_without_the_users_of_actions_gets_them(tmp_path: Path) -> None:
    """One that an earlier build has left: its actions are known, without a user."""
    keep(tmp_path, "a")
    execute(tmp_path, "ALTER TABLE actions DROP COLUMN user")
    log = Log()
    (past,) = opened(tmp_path, log).actions
    assert (past.target, past.user, log.sentences) == ("a", None, [])


@pytest.mark.parametrize("what", ["files", "folder"])
def test_an_intention_is_not_written_to_a_removed_journal(tmp_path: Path, what: str) -> None:
    """Somebody cleans the state folder up under a running agent: the next one must know of the action."""
    folder, log = tmp_path / "state", Log()
    journal = Journal(folder, log, retry_s=60.0)
    journal.open(PATIENCE_S)
    if what == "folder":
        shutil.rmtree(folder)
    else:
        for path in folder.iterdir():
            path.unlink()
    past = PastAction("trouble", "kill_process", "r", time.time())
    assert journal.action("a", past).wait(PATIENCE_S)
    journal.close(PATIENCE_S)
    assert log.sentences
    assert opened(folder, Log()).actions == (past,)


def test_a_journal_that_was_replaced_is_written_where_it_is_now(tmp_path: Path) -> None:
    """The same for a file that somebody has put in its place, as from a backup."""
    keep(tmp_path / "other", "backup")
    folder, log = tmp_path / "state", Log()
    journal = Journal(folder, log, retry_s=60.0)
    journal.open(PATIENCE_S)
    (tmp_path / "other/journal.db").rename(folder / "journal.db")
    past = PastAction("trouble", "kill_process", "r", time.time())
    assert journal.action("a", past).wait(PATIENCE_S)
    journal.close(PATIENCE_S)
    assert any("removed or replaced" in said for said in log)
    assert past in opened(folder, Log()).actions
