"""The journal's file: SQLite in WAL mode, one writer at a time. Every call may wait for the disk."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from opsd.agent.journal_file import (
    KEEP_EVENTS,
    MAX_CURRENT,
    StoreError,
    UnusableError,
    forget,
    free_name,
    lock,
    open_file,
    prune,
    set_aside,
)
from opsd.agent.policy import HARMLESS, PastAction
from opsd.agent.records import RecordError, clean, from_json, past_action, past_event, past_repair, to_json
from opsd.collectors.base import Event, RepairFact
from opsd.collectors.lib.clock import boot_id
from opsd.collectors.repairs import MOST as MAX_REPAIRS
from opsd.durable import make_folder
from opsd.runbooks.base import Incident

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


_REFUSED = (sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError, sqlite3.DataError)
"""What SQLite raises for values that no table of the journal takes."""


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
                self.notices.append(f"{path} {error}; it was set aside as {aside.name} and a new one was created")
                self._database = open_file(path, now)
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
                self._read(
                    actions,
                    recent,
                    lambda row: past_action(row, now),
                    odd["actions"],
                ),
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
