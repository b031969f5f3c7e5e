"""The journal's file: its lock, schema and records, what is kept and for how long, and files that are set aside.

SQLite in WAL mode, one writer at a time. Every call may wait for the disk. A record that opsd did not write is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard, TypeVar

from pydantic import TypeAdapter, ValidationError

from opsd.agent.lifecycle import TIMES
from opsd.agent.policy import HARMLESS, PastAction
from opsd.collectors.base import Event, RepairFact
from opsd.collectors.lib.clock import boot_id
from opsd.collectors.repairs import MOST as MAX_REPAIRS
from opsd.collectors.repairs import parse
from opsd.durable import make_folder
from opsd.runbooks.base import Incident

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
LOCK_WAIT_S = 1.0
"""How long an agent waits for the lock of one that is about to end."""
_STUCK = "DZX"
"""States of a process that waits for a device, or is dead but for a thread that does."""
KEEP_ASIDE = 5
"""Number of files of a kind (damaged, newer, ...) that are kept aside."""


_REFUSED = (sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError, sqlite3.DataError)
"""What SQLite raises for values that no table of the journal takes."""
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
  kind TEXT NOT NULL, verb TEXT NOT NULL, target TEXT NOT NULL
);
"""
_ADDED = {
    ("actions", "user"): "ALTER TABLE actions ADD COLUMN user INTEGER;",
    ("window", "content"): "CREATE TABLE window (id INTEGER PRIMARY KEY, boot TEXT NOT NULL, content BLOB NOT NULL);",
    ("events", "document"): "CREATE TABLE events "
    "(number INTEGER PRIMARY KEY, boot TEXT NOT NULL, at REAL NOT NULL, document TEXT NOT NULL);",
    (
        "repairs",
        "document",
    ): "CREATE TABLE repairs (id TEXT PRIMARY KEY, opened_at REAL NOT NULL, document TEXT NOT NULL);",
}
"""Parts of the schema that older journals may lack, by one of their columns."""


class StoreError(Exception):
    """The file cannot be used; the message says why in one sentence."""


class InUseError(StoreError):
    """Another agent has the journal: ``stuck`` if it cannot do anything with it, as a process that waits for a disk."""

    def __init__(self, path: Path, pid: int | None) -> None:
        who = "another agent" if pid is None else f"another agent (process {pid})"
        super().__init__(f"{path} is in use by {who}; give each its own agent.state_dir")
        self.stuck = pid is not None and _state(pid) in _STUCK


class UnusableError(Exception):
    """The file is no journal of this release: ``word`` for the name it gets, and a predicate."""

    def __init__(self, word: str, predicate: str) -> None:
        super().__init__(predicate)
        self.word = word


def lock(path: Path) -> int:
    """Lock the journal for this agent while the returned file descriptor is open. Raises InUseError, OSError."""
    descriptor = os.open(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise InUseError(path, _holder(os.fstat(descriptor).st_ino)) from error
                time.sleep(LOCK_WAIT_S / 20)
            else:
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _holder(inode: int) -> int | None:
    """The process that holds the flock of the file, by proc_locks(5); None if the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
                return int(fields[4])
    return None


def _state(pid: int) -> str:
    """The state of a process as one letter, see proc_pid_stat(5); "" if there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


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
            statements = f"{_SCHEMA} {' '.join(_ADDED.values())}"
            database.executescript(f"BEGIN; {statements} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
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
    known = {column[:2] for column in tables}
    missing = [statement for column, statement in _ADDED.items() if column not in known]
    if _tables_after(statement for statement in _ADDED.values() if statement not in missing) != tables:
        raise UnusableError("foreign", "has other tables than opsd's")
    for statement in missing:
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


def _tables_after(added: Iterable[str]) -> frozenset[tuple[object, ...]]:
    """The columns of a journal that lacks all but ``added``."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(f"{_SCHEMA} {' '.join(added)}")
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


def salvage(aside: Path, database: sqlite3.Connection) -> int:
    """Take what can be read of a damaged journal over into a new one; returns how many records that are.

    A table is read from both ends, since the damage may be in the middle. Raises sqlite3.Error for the new one.
    """
    before = database.total_changes
    how = "mode=ro" if aside.with_name(f"{aside.name}-wal").exists() else "immutable=1"
    with contextlib.closing(sqlite3.connect(f"{aside.absolute().as_uri()}?{how}", uri=True)) as damaged:
        damaged.text_factory = lambda raw: raw.decode(errors="replace")
        database.execute("BEGIN")
        for table in ("incidents", "transitions", "actions", "window", "events", "repairs"):
            names = [str(name) for (name,) in database.execute("SELECT name FROM pragma_table_info(?)", (table,))]
            columns, values = ", ".join(names), ", ".join("?" * len(names))
            for order in ("ASC", "DESC"):
                query = f"SELECT {columns} FROM {table} ORDER BY rowid {order}"  # noqa: S608
                for row in _readable(damaged, query):
                    with contextlib.suppress(*_REFUSED):
                        database.execute(f"INSERT OR IGNORE INTO {table} VALUES ({values})", row)  # noqa: S608
        database.execute("COMMIT")
    return database.total_changes - before


def _readable(damaged: sqlite3.Connection, query: str) -> Iterator[tuple[object, ...]]:
    """The rows of a query up to the first that cannot be read."""
    with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):
        yield from damaged.execute(query)


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


_ACTION_TEXTS = ("verb", "target", "reason", "outcome", "detail")
_LAST_S = 1e12
"""Epoch seconds beyond all times."""
_MANY = 1_000_000_000


class RecordError(Exception):
    """A record that opsd did not write."""


def to_document(incident: Incident) -> dict[str, Any]:
    """The incident as JSON-able values, the form of the API and of the journal."""
    document = asdict(incident)
    document["data"] = dict(incident.data)
    document["actions"] = [dict(action) for action in incident.actions]
    document["proposed"] = [dict(action) for action in incident.proposed]
    return document


def to_json(incident: Incident) -> str:
    """The document as JSON text in valid UTF-8. Raises TypeError or ValueError for keys that JSON does not have."""
    return clean(json.dumps(to_document(incident), default=str, ensure_ascii=False))


def from_json(text: object) -> Incident:
    """The incident whose ``to_json`` is ``text``. Raises RecordError for anything else."""
    if not isinstance(text, str):
        raise RecordError("not a text")
    try:
        incident = _incidents().validate_json(text, strict=True)
    except ValidationError as error:
        raise RecordError(f"{error.error_count()} values are none of an incident") from error
    if not all(map(_is_time, _times(incident))):
        raise RecordError("a time is no number")
    if not (0 <= incident.attempts < _MANY and 0 <= incident.relapses < _MANY):
        raise RecordError("a count is none")
    if not all(map(_is_action, incident.actions)) or not all(map(_is_proposal, incident.proposed)):
        raise RecordError("an action lacks its fields")
    return incident


def past_action(row: Sequence[object], now: float) -> PastAction:
    """The action of a row with kind, verb, target, time and user; a time to come is ``now``. Raises RecordError."""
    *texts, at, user = row
    if not all(isinstance(text, str) for text in texts) or not _is_time(at):
        raise RecordError("not an action")
    if user is not None and not isinstance(user, int):
        raise RecordError("not an action of a user")
    kind, verb, target = map(str, texts)
    return PastAction(kind, verb, target, min(at, now), user)


def past_repair(row: Sequence[object]) -> RepairFact:
    """The repair of a row with its id and document. Raises RecordError."""
    id, document = row
    try:
        repair = parse(document if isinstance(document, str) else "")
    except ValueError as error:
        raise RecordError("not a repair") from error
    if repair.id != id:
        raise RecordError("column and document differ")
    return repair


def event_document(event: Event) -> str:
    """What the journal keeps of an event beside its time. Raises TypeError or ValueError for what JSON has not."""
    return json.dumps(
        {"kind": event.kind, "at": 0.0, "message": event.message, "data": dict(event.data)}, ensure_ascii=False
    )


def past_event(row: Sequence[object], now: float) -> Event:
    """The event of a row with its time and document; a time to come is ``now``. Raises RecordError."""
    at, document = row
    try:
        event = _events().validate_json(document if isinstance(document, str) else "")
    except ValidationError as error:
        raise RecordError("not an event") from error
    if not _is_time(at):
        raise RecordError("a time is no number")
    return replace(event, at=min(at, now))


def clean(text: str) -> str:
    """``text`` as valid UTF-8: names that users give may be any bytes."""
    return text.encode(errors="replace").decode()


@cache
def _events() -> TypeAdapter[Event]:
    return TypeAdapter(Event)


@cache
def _incidents() -> TypeAdapter[Incident]:
    return TypeAdapter(Incident)


def _times(incident: Incident) -> Iterator[float]:
    ack, end = incident.ack, incident.closed
    times = [getattr(incident, name) for name in TIMES]
    times += [ack.at, ack.until, ack.over_at] if ack is not None else []
    times += [end.at, end.gone_at] if end is not None else []
    yield from (at for at in times if at is not None)
    yield from (at for evidence in incident.evidence for at in (evidence.at, evidence.newest))


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and -_LAST_S < value < _LAST_S


def _is_action(action: Mapping[str, object]) -> bool:
    texts = all(isinstance(action.get(name), str) for name in _ACTION_TEXTS)
    return texts and isinstance(action.get("args"), dict) and _is_time(action.get("at"))


def _is_proposal(action: Mapping[str, object]) -> bool:
    return isinstance(action.get("verb"), str) and isinstance(action.get("args"), dict)


T = TypeVar("T")
Parse = Callable[[Sequence[object]], T]
"""Makes a record of a row. Raises RecordError."""

KEEP_ACTIONS_S = 86_400.0
"""Length of the policy's history of actions in seconds."""
MAX_ENDED = 500
MAX_ACTIONS = 10_000
"""Number of ended incidents, and of actions, that are loaded: the newest."""
Row = tuple[str, tuple[object, ...]]
"""An SQL statement and its values."""


@cache
def this_boot() -> str:
    """Identifies the boot of this machine, "" if the kernel does not tell."""
    try:
        return boot_id()
    except OSError:
        return ""


class MovedError(StoreError):
    """The file was removed or replaced while it was open, and can be opened again at once."""


@dataclass(frozen=True, slots=True)
class JournalContent:
    """The records of an earlier agent: current incidents, ended ones (newest first), recent actions, newest repairs.

    ``events`` are those that kernel and drivers have told since the node was booted, oldest first; ``window`` is what
    an agent that was stopped has kept of its window, b"" for nothing.
    """

    current: Sequence[Incident] = ()
    ended: Sequence[Incident] = ()
    actions: Sequence[PastAction] = ()
    repairs: Sequence[RepairFact] = ()
    events: Sequence[Event] = ()
    window: bytes = b""


class Store:
    """An open journal file, created if missing. One that cannot be used is renamed and replaced by a new one.

    ``now`` is the epoch second that old records are measured against, ``boot`` the boot whose events and window are
    loaded (this one by default). ``notices`` says in one sentence each what was
    set aside. Raises StoreError.
    """

    def __init__(self, path: Path, now: float, boot: str | None = None) -> None:
        self.path = path
        self._boot = this_boot() if boot is None else boot
        self.notices: list[str] = []
        with self._reporting(), contextlib.ExitStack() as undo:
            make_folder(path.parent, mode=0o700)
            self._lock = lock(path)
            undo.callback(os.close, self._lock)
            try:
                self._database = open_file(path, now)
            except UnusableError as error:
                aside = set_aside(path, error.word)
                self._database = open_file(path, now)
                saved = salvage(aside, self._database) if error.word == "damaged" else 0
                taken = f" with the {saved} records of it that can be read" if saved else ""
                self.notices.append(
                    f"{path} {error}; it was set aside as {aside.name} and a new one was created{taken}"
                )
            self._files = self._identities()
            undo.pop_all()

    def load(self, now: float) -> JournalContent:
        """What the file remembers. Records that cannot be read are removed, after a copy of the file was made.

        Raises StoreError.
        """
        current = "SELECT rowid, id, document FROM incidents WHERE resolved_at IS NULL ORDER BY opened_at DESC LIMIT ?"
        ended = (
            "SELECT rowid, id, document FROM incidents WHERE resolved_at IS NOT NULL ORDER BY opened_at DESC LIMIT ?"
        )
        actions = (
            "SELECT rowid, kind, verb, target, at, user FROM actions"
            " WHERE number > (SELECT max(number) FROM actions) - ? AND at > ?"
            " AND verb NOT IN (SELECT value FROM json_each(?)) ORDER BY at"
        )
        repairs = "SELECT rowid, id, document FROM repairs ORDER BY opened_at DESC LIMIT ?"
        events = "SELECT rowid, at, document FROM events WHERE boot = ? ORDER BY number DESC LIMIT ?"
        recent = (MAX_ACTIONS, now - KEEP_ACTIONS_S, json.dumps([*HARMLESS]))
        with self._reporting():
            odd: dict[str, list[int]] = {"incidents": [], "actions": [], "repairs": [], "events": []}
            content = JournalContent(
                self._read(current, (MAX_CURRENT,), lambda row: _incident(row, over=False), odd["incidents"])[::-1],
                self._read(ended, (MAX_ENDED,), lambda row: _incident(row, over=True), odd["incidents"]),
                self._read(actions, recent, lambda row: past_action(row, now), odd["actions"]),
                self._read(repairs, (MAX_REPAIRS,), past_repair, odd["repairs"])[::-1],
                self._read(events, (self._boot, KEEP_EVENTS), lambda row: past_event(row, now), odd["events"])[::-1],
            )
            content = replace(content, window=self._window())
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

    def _window(self) -> bytes:
        found = self._database.execute("SELECT content FROM window WHERE boot = ?", (self._boot,)).fetchone()
        return found[0] if found and isinstance(found[0], bytes) else b""

    def _leave_out(self, odd: dict[str, list[int]]) -> None:
        aside = free_name(self.path, "odd")
        self._database.execute("VACUUM INTO ?", (str(aside),))
        aside.chmod(0o600)
        prune(self.path, "odd")
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

    def forget(self, now: float) -> None:
        """Delete what is too old or too much at the epoch second ``now``. Raises StoreError."""
        with self._reporting():
            forget(self._database, now)

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
        except (sqlite3.Error, OSError, UnicodeDecodeError, UnusableError) as error:
            said = error.strerror if isinstance(error, OSError) else error
            raise StoreError(
                f"{self.path} cannot be written ({said}); records are kept in memory until it can"
            ) from error


def _row(i: Incident) -> Row:
    values = (i.id, i.kind, i.key, i.state, i.opened_at, i.resolved_at, to_json(i))
    return "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?, ?, ?, ?)", values


def _incident(row: Sequence[object], *, over: bool) -> Incident:
    id, document = row
    incident = from_json(document)
    if incident.id != id or (incident.resolved_at is not None) is not over:
        raise RecordError("columns and document differ")
    return incident
