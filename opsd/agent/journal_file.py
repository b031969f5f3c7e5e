"""The file of the journal: its lock and schema, what is kept in it and for how long, and files that are set aside."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from functools import cache
from pathlib import Path

SCHEMA_VERSION = 1
KEEP_S = 90 * 86_400.0
CACHE_KIB = 256
"""The journal is written, and read only at the start; SQLite's own 2 MiB would fill within hours."""
MAX_CURRENT = 2_000
"""Number of current incidents that are kept: the newest."""
KEEP_INCIDENTS = 20_000
KEEP_REPAIRS = 1_000
KEEP_ROWS = 100_000
"""Number of ended incidents, of repairs, and of actions and of transitions, that are kept."""
KEEP_EVENTS = 2_000
"""Number of events that are kept for the window of the next agent: the newest."""
FORGET_EVENTS = "DELETE FROM events WHERE number <= (SELECT max(number) FROM events) - ?"
WASTE_BYTES = 64 << 20
"""A file with more unused room than this is written again when it is opened."""
KEEP_ASIDE = 5
"""Number of files of a kind (damaged, newer, ...) that are kept aside."""


_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_ERROR)
"""Result codes for a file whose content is no journal; the last one for a format that SQLite does not know."""
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
_REPAIRS = "CREATE TABLE repairs (id TEXT PRIMARY KEY, opened_at REAL NOT NULL, document TEXT NOT NULL)"
_EVENTS = (
    "CREATE TABLE events (number INTEGER PRIMARY KEY, boot TEXT NOT NULL, at REAL NOT NULL, document TEXT NOT NULL)"
)
_WINDOW = "CREATE TABLE window (id INTEGER PRIMARY KEY, boot TEXT NOT NULL, content BLOB NOT NULL)"
_ADDED = (
    ("ALTER TABLE actions ADD COLUMN user INTEGER", frozenset({("actions", "user", "INTEGER", 0)})),
    (
        _WINDOW,
        frozenset({("window", "id", "INTEGER", 1), ("window", "boot", "TEXT", 0), ("window", "content", "BLOB", 0)}),
    ),
    (
        _EVENTS,
        frozenset(
            {
                ("events", "number", "INTEGER", 1),
                ("events", "boot", "TEXT", 0),
                ("events", "at", "REAL", 0),
                ("events", "document", "TEXT", 0),
            }
        ),
    ),
    (
        _REPAIRS,
        frozenset(
            {("repairs", "id", "TEXT", 1), ("repairs", "opened_at", "REAL", 0), ("repairs", "document", "TEXT", 0)}
        ),
    ),
)
"""Tables that journals of this schema may lack, and the columns to add."""


class StoreError(Exception):
    """The file cannot be used; the message says why in one sentence."""


class UnusableError(Exception):
    """The file is no journal of this release: ``word`` for the name it gets, and a predicate."""

    def __init__(self, word: str, predicate: str) -> None:
        super().__init__(predicate)
        self.word = word


def lock(path: Path) -> int:
    """Lock the journal for this agent while the returned file descriptor is open."""
    descriptor = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreError(f"{path} is in use by another agent; give each its own agent.state_dir") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: Path, now: float) -> sqlite3.Connection:
    """The journal, made if missing, without what is too old or too much. Raises UnusableError, sqlite3.Error."""
    database = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    try:
        database.text_factory = lambda raw: raw.decode(errors="replace")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        tables = _tables(database)
        if version != SCHEMA_VERSION and (tables or version):
            age = "newer" if version > SCHEMA_VERSION else "older"
            raise UnusableError(age, f"was written by a{'n' * (age == 'older')} {age} opsd (schema {version})")
        database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # an intention must survive the node, not only the agent
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise UnusableError("damaged", "is damaged")
        if version == 0:
            database.executescript(
                f"BEGIN; {_SCHEMA} {_REPAIRS}; {_EVENTS}; {_WINDOW}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        else:
            _complete(database, tables)
        forget(database, now)
        if _pragma(database, "freelist_count") * _pragma(database, "page_size") > WASTE_BYTES:
            database.execute("VACUUM")
    except BaseException as error:
        database.close()
        if _is_damage(error):
            raise UnusableError("damaged", "is damaged") from error
        raise
    return database


def _complete(database: sqlite3.Connection, tables: frozenset[tuple[object, ...]]) -> None:
    """Add what a journal of an earlier release lacks. Raises UnusableError, sqlite3.Error."""
    missing = [added for added in _ADDED if not added[1] & tables]
    if tables.union(*(columns for _, columns in missing)) != _own_tables():
        raise UnusableError("foreign", "has other tables than opsd's")
    for statement, _ in missing:
        database.execute(statement)


def forget(database: sqlite3.Connection, now: float) -> None:
    """Delete what is too old, and the oldest of what is too much.

    Too old is what was long before the newest incident: a clock that is a year ahead takes no history away.
    """
    (newest,) = database.execute("SELECT max(opened_at) FROM incidents").fetchone()
    oldest = (min(now, newest) if isinstance(newest, int | float) else now) - KEEP_S
    database.execute("DELETE FROM incidents WHERE resolved_at < ?", (oldest,))
    for over, number in (("IS NOT NULL", KEEP_INCIDENTS), ("IS NULL", MAX_CURRENT)):
        newest = f"SELECT opened_at FROM incidents WHERE resolved_at {over} ORDER BY opened_at DESC LIMIT 1 OFFSET ?"  # noqa: S608
        last = database.execute(newest, (number,)).fetchone()
        if last is not None:
            database.execute(f"DELETE FROM incidents WHERE resolved_at {over} AND opened_at <= ?", last)  # noqa: S608
    kept = "SELECT rowid FROM repairs ORDER BY opened_at DESC LIMIT ?"
    database.execute(f"DELETE FROM repairs WHERE rowid NOT IN ({kept})", (KEEP_REPAIRS,))  # noqa: S608
    database.execute(FORGET_EVENTS, (KEEP_EVENTS,))
    for table in ("actions", "transitions"):
        excess = f"number <= (SELECT max(number) FROM {table}) - ?"  # noqa: S608
        database.execute(f"DELETE FROM {table} WHERE at < ? OR {excess}", (oldest, KEEP_ROWS))  # noqa: S608


def _pragma(database: sqlite3.Connection, name: str) -> int:
    (value,) = database.execute(f"PRAGMA {name}").fetchone()
    return int(value)


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
        database.executescript(f"{_SCHEMA} {_REPAIRS}; {_EVENTS}; {_WINDOW};")
        return _tables(database)


def set_aside(path: Path, word: str) -> Path:
    """Rename the file, and what SQLite keeps beside it, to a name with ``word``.

    The file comes last: SQLite would play a log that stays behind into the next file of this name.
    """
    aside = free_name(path, word)
    for suffix in ("-shm", "-wal", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    prune(path, word)
    return aside


def free_name(path: Path, word: str) -> Path:
    """A name beside ``path`` with ``word`` and the time that no file has."""
    stem = f"{path.name}.{word}-{time.strftime('%Y%m%dT%H%M%S')}"
    names = (path.with_name(f"{stem}.{number}" if number else stem) for number in range(1_000_000))
    return next(name for name in names if not name.exists())


def prune(path: Path, word: str) -> None:
    """Remove all but the newest files of ``word``."""
    kept = [p for p in path.parent.glob(f"{path.name}.{word}-*") if not p.name.endswith(("-wal", "-shm"))]
    for old in sorted(kept, key=lambda p: p.stat().st_mtime_ns)[:-KEEP_ASIDE]:
        for suffix in ("", "-wal", "-shm"):
            old.with_name(old.name + suffix).unlink(missing_ok=True)
