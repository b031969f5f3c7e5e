"""The journal's file: SQLite in WAL mode, one writer at a time. Every call may wait for the disk."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from opsd.agent.policy import PastAction
from opsd.runbooks.base import Cost, Culprit, Evidence, Incident, Severity, State

SCHEMA_VERSION = 1
KEEP_S = 90 * 86_400.0
KEEP_ACTIONS_S = 86_400.0
"""Length of the policy's history of actions in seconds."""
MAX_ENDED = 500
"""Number of ended incidents that are loaded."""

Row = tuple[str, tuple[object, ...]]
"""An SQL statement and its values."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SCHEMA = """
CREATE TABLE incidents (
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, state TEXT NOT NULL,
  opened_at REAL NOT NULL, resolved_at REAL, document TEXT NOT NULL
);
CREATE INDEX incidents_current ON incidents (opened_at) WHERE resolved_at IS NULL;
CREATE INDEX incidents_by_time ON incidents (opened_at);
CREATE TABLE transitions (
  number INTEGER PRIMARY KEY, incident TEXT NOT NULL, at REAL NOT NULL,
  before TEXT, after TEXT NOT NULL, text TEXT NOT NULL
);
CREATE TABLE actions (
  number INTEGER PRIMARY KEY, incident TEXT NOT NULL, at REAL NOT NULL,
  kind TEXT NOT NULL, verb TEXT NOT NULL, target TEXT NOT NULL
);
"""


class StoreError(Exception):
    """The file cannot be used; the message says why in one sentence."""


class _DamagedError(Exception):
    """The file is no database, or is damaged."""


@dataclass(frozen=True, slots=True)
class JournalContent:
    """The records of an earlier agent: current incidents, recently ended ones (newest first), recent actions."""

    current: Sequence[Incident] = ()
    ended: Sequence[Incident] = ()
    actions: Sequence[PastAction] = ()


class Store:
    """An open journal file, created if missing; a damaged one is renamed to ``aside`` and replaced by a new one.

    ``now`` is the epoch second that old records are measured against. Raises StoreError.
    """

    def __init__(self, path: Path, now: float) -> None:
        self.path = path
        self.aside: Path | None = None
        with self._reporting(), contextlib.ExitStack() as undo:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(path)
            undo.callback(os.close, self._lock)
            try:
                self._database = _open(path, now)
            except _DamagedError:
                self.aside = _set_aside(path)
                self._database = _open(path, now)
            undo.pop_all()

    def load(self, now: float) -> JournalContent:
        """What the file remembers. Raises StoreError."""
        current = "SELECT document FROM incidents WHERE resolved_at IS NULL ORDER BY opened_at"
        ended = "SELECT document FROM incidents WHERE resolved_at IS NOT NULL ORDER BY opened_at DESC LIMIT ?"
        actions = "SELECT kind, verb, target, at FROM actions WHERE at > ? ORDER BY at"
        with self._reporting():
            return JournalContent(
                tuple(_documents(self._database.execute(current))),
                tuple(_documents(self._database.execute(ended, (MAX_ENDED,)))),
                tuple(PastAction(*row) for row in self._database.execute(actions, (now - KEEP_ACTIONS_S,))),
            )

    def write(self, incidents: Iterable[Incident], rows: Iterable[Row]) -> None:
        """Write all or nothing. Raises StoreError."""
        with self._reporting():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in (*map(_row, incidents), *rows):
                    self._database.execute(statement, values)
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the file, so that another agent may open it."""
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, _DamagedError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            raise StoreError(
                f"{self.path} cannot be written ({said}); records are kept in memory until it can"
            ) from error


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


def _lock(path: Path) -> int:
    """Lock the journal for this agent while the returned file descriptor is open."""
    lock = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise StoreError(f"{path} is in use by another agent; give each its own agent.state_dir") from error
    return lock


def _open(path: Path, now: float) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise StoreError(f"{path} was written by a newer opsd (schema {version}); use that one or move the file")
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


def _row(i: Incident) -> Row:
    document = json.dumps(to_document(i), default=str)
    values = (i.id, i.kind, i.key, i.state, i.opened_at, i.resolved_at, document)
    return "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?, ?, ?, ?)", values


def _documents(rows: Iterable[tuple[str]]) -> Iterator[Incident]:
    for (text,) in rows:
        # A record of another release that cannot be read is skipped: the journal must never stop the agent.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            yield from_document(json.loads(text))
