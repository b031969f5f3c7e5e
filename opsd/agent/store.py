"""The journal's file: SQLite in WAL mode, one writer at a time. Every call may wait for the disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from opsd.agent.policy import PastAction
from opsd.agent.records import RecordError, clean, from_json, past_action, to_json
from opsd.runbooks.base import Incident

T = TypeVar("T")
Parse = Callable[[Sequence[object]], T]
"""Makes a record of a row. Raises RecordError."""

SCHEMA_VERSION = 1
KEEP_S = 90 * 86_400.0
KEEP_ACTIONS_S = 86_400.0
"""Length of the policy's history of actions in seconds."""
MAX_ENDED = 500
"""Number of ended incidents that are loaded."""
KEEP_ASIDE = 5
"""Number of files of a kind (damaged, newer, ...) that are kept aside."""

Row = tuple[str, tuple[object, ...]]
"""An SQL statement and its values."""

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_ERROR)
"""Result codes for a file whose content is no journal; the last one for a format that SQLite does not know."""
_REFUSED = (sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError, sqlite3.DataError)
"""What SQLite raises for values that no table of the journal takes."""
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
  kind TEXT NOT NULL, verb TEXT NOT NULL, target TEXT NOT NULL, user INTEGER
);
"""
_ADDED = ("actions", "user", "INTEGER", 0)
"""A column that journals of this schema may still lack."""


class StoreError(Exception):
    """The file cannot be used; the message says why in one sentence."""


class MovedError(StoreError):
    """The file was removed or replaced while it was open, and can be opened again at once."""


class _UnusableError(Exception):
    """The file is no journal of this release: ``word`` for the name it gets, and a predicate."""

    def __init__(self, word: str, predicate: str) -> None:
        super().__init__(predicate)
        self.word = word


@dataclass(frozen=True, slots=True)
class JournalContent:
    """The records of an earlier agent: current incidents, recently ended ones (newest first), recent actions."""

    current: Sequence[Incident] = ()
    ended: Sequence[Incident] = ()
    actions: Sequence[PastAction] = ()


class Store:
    """An open journal file, created if missing. One that cannot be used is renamed and replaced by a new one.

    ``now`` is the epoch second that old records are measured against. ``notices`` says in one sentence each what was
    set aside. Raises StoreError.
    """

    def __init__(self, path: Path, now: float) -> None:
        self.path = path
        self.notices: list[str] = []
        with self._reporting(), contextlib.ExitStack() as undo:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(path)
            undo.callback(os.close, self._lock)
            try:
                self._database = _open(path, now)
            except _UnusableError as error:
                aside = _set_aside(path, error.word)
                self.notices.append(f"{path} {error}; it was set aside as {aside.name} and a new one was created")
                self._database = _open(path, now)
            self._files = self._identities()
            undo.pop_all()

    def load(self, now: float) -> JournalContent:
        """What the file remembers. Records that cannot be read are removed, after a copy of the file was made.

        Raises StoreError.
        """
        current = "SELECT rowid, id, document FROM incidents WHERE resolved_at IS NULL ORDER BY opened_at"
        ended = (
            "SELECT rowid, id, document FROM incidents WHERE resolved_at IS NOT NULL ORDER BY opened_at DESC LIMIT ?"
        )
        actions = "SELECT rowid, kind, verb, target, at, user FROM actions WHERE at > ? ORDER BY at"
        with self._reporting():
            odd: dict[str, list[int]] = {"incidents": [], "actions": []}
            content = JournalContent(
                self._read(current, (), lambda row: _incident(row, over=False), odd["incidents"]),
                self._read(ended, (MAX_ENDED,), lambda row: _incident(row, over=True), odd["incidents"]),
                self._read(actions, (now - KEEP_ACTIONS_S,), lambda row: past_action(row, now), odd["actions"]),
            )
            if any(odd.values()):
                self._leave_out(odd)
            return content

    def _read(
        self, query: str, values: tuple[object, ...], parse: Callable[[Sequence[object]], T], odd: list[int]
    ) -> tuple[T, ...]:
        read = []
        for number, *row in self._database.execute(query, values):
            try:
                read.append(parse(row))
            except RecordError:
                odd.append(number)
        return tuple(read)

    def _leave_out(self, odd: dict[str, list[int]]) -> None:
        aside = _free_name(self.path, "odd")
        self._database.execute("VACUUM INTO ?", (str(aside),))
        aside.chmod(0o600)
        _prune(self.path, "odd")
        for table, numbers in odd.items():
            delete = f"DELETE FROM {table} WHERE rowid = ?"  # noqa: S608
            self._database.executemany(delete, [(number,) for number in numbers])
        count = sum(map(len, odd.values()))
        records = "1 record" if count == 1 else f"{count} records"
        self.notices.append(f"{self.path} has lost {records} that cannot be read; a copy of all is {aside.name}")

    def write(self, incidents: Iterable[Incident], rows: Iterable[Row]) -> tuple[int, list[bool]]:
        """Write all to the disk, or nothing; returns how many incidents were refused, and which rows were written.

        A record is refused whose values no table takes. Raises StoreError.
        """
        with self._reporting():
            if self._identities() != self._files:  # SQLite would go on writing to files that nobody finds again
                raise MovedError(f"{self.path} was removed or replaced while it was open; it is opened again")
            self._database.execute("BEGIN IMMEDIATE")
            try:
                kept = [self._insert(partial(_row, incident)) for incident in incidents]
                written = [self._insert(lambda: row) for row in rows]  # noqa: B023
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
        return kept.count(False), written

    def _insert(self, make: Callable[[], Row]) -> bool:
        try:
            statement, values = make()
            self._database.execute(statement, tuple(clean(v) if isinstance(v, str) else v for v in values))
        except (*_REFUSED, TypeError, ValueError, OverflowError, RecursionError):
            return False
        return True

    def _identities(self) -> list[tuple[int, int]]:
        """Which files the journal and its lock are; empty if one is missing. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            found = [path.stat() for path in (self.path, self.path.with_suffix(".lock"))]
            return [(file.st_dev, file.st_ino) for file in found]
        return []

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
        except (sqlite3.Error, OSError, UnicodeDecodeError, _UnusableError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            raise StoreError(
                f"{self.path} cannot be written ({said}); records are kept in memory until it can"
            ) from error


def _lock(path: Path) -> int:
    """Lock the journal for this agent while the returned file descriptor is open."""
    lock = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise StoreError(f"{path} is in use by another agent; give each its own agent.state_dir") from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def _open(path: Path, now: float) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    try:
        database.text_factory = lambda raw: raw.decode(errors="replace")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        tables = _tables(database)
        if version != SCHEMA_VERSION and (tables or version):
            age = "newer" if version > SCHEMA_VERSION else "older"
            raise _UnusableError(age, f"was written by a{'n' * (age == 'older')} {age} opsd (schema {version})")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # an intention must survive the node, not only the agent
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise _UnusableError("damaged", "is damaged")
        if version == 0:
            database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif tables == _own_tables() - {_ADDED}:
            database.execute("ALTER TABLE actions ADD COLUMN user INTEGER")
        elif tables != _own_tables():
            raise _UnusableError("foreign", "has other tables than opsd's")
        database.execute("DELETE FROM incidents WHERE resolved_at < ?", (now - KEEP_S,))
        database.execute("DELETE FROM actions WHERE at < ?", (now - KEEP_S,))
        database.execute("DELETE FROM transitions WHERE at < ?", (now - KEEP_S,))
    except BaseException as error:
        database.close()
        if _is_damage(error):
            raise _UnusableError("damaged", "is damaged") from error
        raise
    return database


def _is_damage(error: BaseException) -> bool:
    """Whether SQLite says that the file is damaged, be it in a message that is no UTF-8, which Python cannot raise."""
    if isinstance(error, sqlite3.DatabaseError):
        return error.sqlite_errorcode & 0xFF in _DAMAGED
    return isinstance(error, UnicodeDecodeError)


def _tables(database: sqlite3.Connection) -> frozenset[tuple[object, ...]]:
    """Every column of every table, with its type."""
    columns = "SELECT t.name, c.name, c.type, c.pk FROM sqlite_master t JOIN pragma_table_info(t.name) c"
    return frozenset(database.execute(f"{columns} WHERE t.type = 'table'"))


@cache
def _own_tables() -> frozenset[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(_SCHEMA)
        return _tables(database)


def _set_aside(path: Path, word: str) -> Path:
    """Rename the file, and what SQLite keeps beside it, to a name with ``word``."""
    aside = _free_name(path, word)
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    _prune(path, word)
    return aside


def _free_name(path: Path, word: str) -> Path:
    stem = f"{path.name}.{word}-{time.strftime('%Y%m%dT%H%M%S')}"
    names = (path.with_name(f"{stem}.{number}" if number else stem) for number in range(1_000_000))
    return next(name for name in names if not name.exists())


def _prune(path: Path, word: str) -> None:
    """Remove all but the newest files of ``word``."""
    kept = [p for p in path.parent.glob(f"{path.name}.{word}-*") if not p.name.endswith(("-wal", "-shm"))]
    for old in sorted(kept, key=lambda p: p.stat().st_mtime_ns)[:-KEEP_ASIDE]:
        for suffix in ("", "-wal", "-shm"):
            old.with_name(old.name + suffix).unlink(missing_ok=True)


def _row(i: Incident) -> Row:
    values = (i.id, i.kind, i.key, i.state, i.opened_at, i.resolved_at, to_json(i))
    return "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?, ?, ?, ?)", values


def _incident(row: Sequence[object], *, over: bool) -> Incident:
    id, document = row
    incident = from_json(document)
    if incident.id != id or (incident.resolved_at is not None) is not over:
        raise RecordError("columns and document differ")
    return incident
