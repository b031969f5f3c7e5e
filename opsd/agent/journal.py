"""The journal: incidents, actions and transitions in a SQLite file, written behind the loop's back.

The loop only puts records into memory; a thread writes them. A disk that is full, read-only or hung therefore never
stops the agent: what is not written yet stays in a bounded backlog and is written when the disk is back. A damaged
file is set aside by renaming it. Nothing that is recorded contains secrets: it is what the API shows.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opsd.agent.incidents import Transition
from opsd.agent.policy import Past
from runbooks.base import Cost, Culprit, Evidence, Incident, Severity, State

SCHEMA_VERSION = 1
MAX_BACKLOG = 10_000
MAX_ENDED = 500
"""Ended incidents that are loaded at start."""
RETRY_S = 5.0
KEEP_S = 90 * 86_400.0
KEEP_ACTIONS_S = 86_400.0
"""How far back the policy's history of actions reaches."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SCHEMA = """
CREATE TABLE incidents (
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, state TEXT NOT NULL,
  opened_at REAL NOT NULL, resolved_at REAL, document TEXT NOT NULL
) STRICT;
CREATE INDEX incidents_current ON incidents (opened_at) WHERE resolved_at IS NULL;
CREATE INDEX incidents_by_time ON incidents (opened_at);
CREATE TABLE transitions (
  number INTEGER PRIMARY KEY, incident TEXT NOT NULL, at REAL NOT NULL,
  before TEXT, after TEXT NOT NULL, text TEXT NOT NULL
) STRICT;
CREATE TABLE actions (
  number INTEGER PRIMARY KEY, incident TEXT NOT NULL, at REAL NOT NULL,
  kind TEXT NOT NULL, verb TEXT NOT NULL, target TEXT NOT NULL
) STRICT;
"""


def to_document(incident: Incident) -> dict[str, Any]:
    """The incident as JSON-able values, the form of the API and of the journal."""
    document = asdict(incident)
    document["data"] = dict(incident.data)
    document["actions"] = [dict(action) for action in incident.actions]
    return document


def from_document(document: Mapping[str, Any]) -> Incident:
    """The incident that ``to_document`` made. Raises KeyError, TypeError or ValueError for anything else."""
    return Incident(
        **{
            **document,
            "severity": Severity(document["severity"]),
            "state": State(document["state"]),
            "culprit": Culprit(**document["culprit"]),
            "evidence": tuple(Evidence(**evidence) for evidence in document["evidence"]),
            "cost": Cost(**document["cost"]),
            "actions": tuple(document["actions"]),
        }
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """What an earlier agent left behind: current incidents, the newest ended ones (newest first), recent actions."""

    current: Sequence[Incident] = ()
    ended: Sequence[Incident] = ()
    actions: Sequence[Past] = ()


class _UnusableError(Exception):
    """The file is somebody else's; the message says whose in one sentence."""


class _DamagedError(Exception):
    """The file is no database, or no longer a whole one."""


class Journal:
    """Records of one agent. Methods may be called from any thread; only ``open``, ``flush`` and ``close`` wait.

    ``problem`` says in one sentence why records are not being written, "" if they are; ``on_problem`` is called with
    it, from the writing thread, whenever it changes.
    """

    def __init__(
        self,
        folder: Path,
        on_problem: Callable[[str], None],
        *,
        retry_s: float = RETRY_S,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path = folder / "journal.db"
        self.problem = "not opened yet"
        self.lost = 0
        self._on_problem = on_problem
        self._retry_s, self._wall = retry_s, wall
        self._memory: Memory | None = None
        self._lock: int | None = None
        self._incidents: dict[str, Incident] = {}
        self._rows: list[tuple[str, tuple[object, ...]]] = []
        self._state = threading.Condition()
        self._writing = self._closing = False
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)

    @property
    def backlog(self) -> int:
        """Records not written yet."""
        return len(self._incidents) + len(self._rows)

    def open(self, patience_s: float = 2.0) -> Memory:
        """Start writing and return what the journal holds; nothing if it cannot be read within ``patience_s``."""
        self._thread.start()
        with self._state:
            self._state.wait_for(lambda: self._memory is not None, patience_s)
            return self._memory or Memory()

    def incident(self, incident: Incident) -> None:
        """Record the incident as it is now."""
        with self._state:
            self._incidents.pop(incident.id, None)
            self._incidents[incident.id] = incident
            if len(self._incidents) > MAX_BACKLOG:
                del self._incidents[next(iter(self._incidents))]
                self.lost += 1
            self._state.notify_all()

    def transition(self, t: Transition) -> None:
        """Record a change of state."""
        statement = "INSERT INTO transitions (incident, at, before, after, text) VALUES (?, ?, ?, ?, ?)"
        self._append(statement, (t.incident, t.at, t.before, t.after, t.text))

    def action(self, incident: str, past: Past) -> None:
        """Record that an action was begun."""
        statement = "INSERT INTO actions (incident, kind, verb, target, at) VALUES (?, ?, ?, ?, ?)"
        self._append(statement, (incident, past.kind, past.verb, past.target, past.at))

    def flush(self, patience_s: float) -> bool:
        """Wait until everything recorded so far is written; False if that took longer."""
        with self._state:
            return self._state.wait_for(lambda: not self.backlog and not self._writing, patience_s)

    def close(self, patience_s: float = 1.0) -> None:
        """Write what is left, as far as that is possible in ``patience_s``."""
        if not self.problem:
            self.flush(patience_s)
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join(patience_s)

    def _append(self, statement: str, values: tuple[object, ...]) -> None:
        with self._state:
            self._rows.append((statement, values))
            if len(self._rows) > MAX_BACKLOG:
                del self._rows[0]
                self.lost += 1
            self._state.notify_all()

    def _work(self) -> None:
        database: sqlite3.Connection | None = None
        while True:
            incidents: dict[str, Incident] = {}
            rows: list[tuple[str, tuple[object, ...]]] = []
            try:
                if database is None:
                    database = self._connect()
                incidents, rows = self._take()
                _write(database, incidents.values(), rows)
                self._set_problem("")
            except (sqlite3.Error, OSError, _UnusableError) as error:
                self._give_back(incidents, rows)
                if database is not None:
                    database.close()
                    database = None
                self._set_problem(_reason(self.path, error))
            with self._state:
                self._writing = False
                self._memory = self._memory or Memory()
                self._state.notify_all()
                if self.problem:
                    self._state.wait_for(lambda: self._closing, self._retry_s)
                else:
                    self._state.wait_for(lambda: self._closing or self.backlog > 0)
                if self._closing:
                    break
        if database is not None:
            database.close()
        if self._lock is not None:
            os.close(self._lock)

    def _take(self) -> tuple[dict[str, Incident], list[tuple[str, tuple[object, ...]]]]:
        with self._state:
            self._writing = True
            taken = self._incidents, self._rows
            self._incidents, self._rows = {}, []
            return taken

    def _give_back(self, incidents: dict[str, Incident], rows: list[tuple[str, tuple[object, ...]]]) -> None:
        with self._state:
            self._incidents = {**incidents, **self._incidents}
            self._rows = rows + self._rows

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._on_problem(problem)

    def _connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._lock is None:
            self._lock = _lock(self.path)
        try:
            database = _open(self.path, self._wall())
        except _DamagedError:
            aside = _set_aside(self.path)
            self._on_problem(f"{self.path} is damaged; it was set aside as {aside.name} and a new journal was begun")
            database = _open(self.path, self._wall())
        if self._memory is None:
            self._memory = _load(database, self._wall())
        return database


def _lock(path: Path) -> int:
    """The right to write the journal, while the file descriptor returned is open: two agents would undo each other."""
    lock = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise _UnusableError(f"{path} is in use by another agent; give each its own agent.state_dir") from error
    return lock


def _open(path: Path, now: float) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise _UnusableError(
                f"{path} was written by a newer opsd (schema {version}); use that one or move the file"
            )
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise _DamagedError(verdict)
        if version == 0:
            database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        database.execute("DELETE FROM incidents WHERE resolved_at < ?", (now - KEEP_S,))
        database.execute("DELETE FROM actions WHERE at < ?", (now - KEEP_S,))
        database.execute("DELETE FROM transitions WHERE at < ?", (now - KEEP_S,))
    except BaseException as error:
        database.close()
        if isinstance(error, sqlite3.DatabaseError) and error.sqlite_errorcode in _DAMAGED:
            raise _DamagedError(str(error)) from error
        raise
    return database


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return aside


def _write(
    database: sqlite3.Connection, incidents: Iterable[Incident], rows: Iterable[tuple[str, tuple[object, ...]]]
) -> None:
    database.execute("BEGIN IMMEDIATE")
    try:
        for incident in incidents:
            database.execute(
                "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    incident.id, incident.kind, incident.key, incident.state, incident.opened_at, incident.resolved_at,
                    json.dumps(to_document(incident), default=str),
                ),
            )  # fmt: skip
        for statement, values in rows:
            database.execute(statement, values)
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _load(database: sqlite3.Connection, now: float) -> Memory:
    current = "SELECT document FROM incidents WHERE resolved_at IS NULL ORDER BY opened_at"
    ended = "SELECT document FROM incidents WHERE resolved_at IS NOT NULL ORDER BY opened_at DESC LIMIT ?"
    actions = "SELECT kind, verb, target, at FROM actions WHERE at > ? ORDER BY at"
    return Memory(
        tuple(_documents(database.execute(current))),
        tuple(_documents(database.execute(ended, (MAX_ENDED,)))),
        tuple(Past(*row) for row in database.execute(actions, (now - KEEP_ACTIONS_S,))),
    )


def _documents(rows: Iterable[tuple[str]]) -> Iterator[Incident]:
    for (text,) in rows:
        # A record of another release that does not fit is left where it is: the journal must never stop the agent.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            yield from_document(json.loads(text))


def _reason(path: Path, error: Exception) -> str:
    if isinstance(error, _UnusableError):
        return str(error)
    said = error.strerror if isinstance(error, OSError) else str(error)
    return f"{path} cannot be written ({said}); records are kept in memory until it can"
