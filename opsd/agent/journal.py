"""The journal: incidents, actions and transitions, written asynchronously.

The loop only puts records into memory; a thread writes them. A disk that is full, read-only or hung therefore never
stops the agent: unwritten records stay in a bounded backlog and are written when the disk is back. Records contain no
secrets, only what the API shows.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from opsd.agent.incidents import Transition
from opsd.agent.lifecycle import TIMES
from opsd.agent.policy import PastAction
from opsd.agent.store import (
    FORGET_EVENTS,
    KEEP_EVENTS,
    InUseError,
    JournalContent,
    MovedError,
    RecordError,
    Row,
    Store,
    StoreError,
    event_document,
    from_json,
    this_boot,
    to_json,
)
from opsd.collectors.base import Event, RepairFact
from opsd.runbooks.base import Incident

MAX_BACKLOG = 10_000
RETRY_S = 5.0
SLOW_S = 4.0
"""Seconds in which records should be on the disk; actions wait for theirs little longer."""
FORGETS_EVERY_S = 3600.0
MAX_COPIED = 256
"""Number of current incidents in a copy, and of ended ones: the newest."""
MAX_COPY_BYTES = 16 << 20


class Intention:
    """The record of an action that is to begin."""

    def __init__(self, state: threading.Condition) -> None:
        self._state = state
        self._written: bool | None = None

    def wait(self, patience_s: float) -> bool:
        """Wait until the record is on the disk; False if it is lost, or not there within ``patience_s``."""
        with self._state:
            self._state.wait_for(lambda: self._written is not None, patience_s)
            return self._written is True

    def settle(self, written: bool) -> None:
        """Say whether the record is on the disk, or lost. The caller holds the condition."""
        self._written = written
        self._state.notify_all()


Record = tuple[Row, Intention | None]


class IncidentCopy:
    """A file with the newest incidents: for a journal that cannot be read or written, or that is an older one.

    Without a ``folder`` there is none. It is no promise to anybody: it is written without a sync, if it can be.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / "incidents.jsonl" if folder is not None else None
        self._lines: dict[str, tuple[Incident, str]] = {}

    def read(self) -> Iterator[Incident]:
        """The incidents that the last agent has saved, as far as they can be read."""
        with contextlib.suppress(OSError):
            if self._path is not None and self._path.lstat().st_size <= MAX_COPY_BYTES:
                for line in self._path.read_text(errors="replace").splitlines():
                    with contextlib.suppress(RecordError):
                        yield from_json(line)

    def save(self, incidents: Iterable[Incident]) -> None:
        """Write ``incidents`` in the place of the last ones; nothing if that cannot be done."""
        if self._path is None:
            return
        lines = {}
        for incident in incidents:
            known = self._lines.get(incident.id)
            with contextlib.suppress(TypeError, ValueError):
                lines[incident.id] = known if known and known[0] is incident else (incident, to_json(incident))
        self._lines = lines
        draft = self._path.with_name(f".{self._path.name}.draft")
        with contextlib.suppress(OSError):
            draft.write_text("".join(f"{line}\n" for _, line in lines.values()))
            draft.replace(self._path)


def joined(content: JournalContent, copied: Iterable[Incident]) -> tuple[JournalContent, Sequence[Incident]]:
    """``content`` with those of the ``copied`` incidents that it lacks or has in an older state, and these."""
    known = {incident.id: incident for incident in (*content.current, *content.ended)}
    newer = [i for i in copied if i.id not in known or _newest(i) > _newest(known[i.id])]
    if not newer:
        return content, ()
    by_time = sorted({**known, **{i.id: i for i in newer}}.values(), key=lambda incident: incident.opened_at)
    current = tuple(incident for incident in by_time if incident.resolved_at is None)
    ended = tuple(incident for incident in reversed(by_time) if incident.resolved_at is not None)
    return replace(content, current=current, ended=ended), newer


def _newest(incident: Incident) -> float:
    times = (getattr(incident, name) for name in TIMES)
    return float(max(at for at in times if at is not None))


class Journal:
    """Records of one agent. Methods may be called from any thread; only ``open``, ``flush`` and ``close`` wait.

    ``problem`` says in one sentence why records are not being written ("": they are). The writing thread calls
    ``on_problem`` with it whenever it changes, and with the files that were set aside (but not while a disk hangs).
    ``lost``
    counts records dropped because the backlog was full, or because no table takes their values. ``opened`` counts how
    often a file was opened: it may be another one than before, and lack what was written.
    """

    def __init__(
        self,
        folder: Path,
        on_problem: Callable[[str], None],
        *,
        retry_s: float = RETRY_S,
        slow_s: float = SLOW_S,
        wall: Callable[[], float] = time.time,
        boot: str | None = None,
        memory: Path | None = None,
    ) -> None:
        self.path = folder / "journal.db"
        self._boot = this_boot() if boot is None else boot
        self._problem = "not opened yet"
        self.lost = self.opened = self._events = 0
        self._on_problem = on_problem
        self._retry_s, self._slow_s, self._wall = retry_s, slow_s, wall
        self._memory: JournalContent | None = None
        self._tried = self._loaded = False
        self._incidents: dict[str, Incident] = {}
        self._current: dict[str, Incident] = {}
        self._ended: dict[str, Incident] = {}
        self._copied = True
        self._beside, self._in_memory = IncidentCopy(folder), IncidentCopy(memory)
        self._refused: InUseError | None = None
        self._rows: list[Record] = []
        self._state = threading.Condition()
        self._writing_since: float | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)

    @property
    def problem(self) -> str:
        """Why records are not being written, "" if they are."""
        since = self._writing_since
        if not self._problem and since is not None and time.monotonic() - since > self._slow_s:
            return f"{self.path} is being written for more than {self._slow_s:g} s; the disk hangs or is slow"
        return self._problem

    @property
    def backlog(self) -> int:
        """Records not written yet."""
        return len(self._incidents) + len(self._rows)

    def open(self, patience_s: float = 2.0) -> JournalContent:
        """Start writing and return what an earlier agent knew.

        If the journal cannot be read within ``patience_s``, these are the incidents that are copied to memory. Raises
        InUseError if another agent that is well has the journal.
        """
        self._thread.start()
        with self._state:
            self._state.wait_for(lambda: self._tried, patience_s)
            self._tried = True
        if self._refused is not None:
            raise self._refused
        return self._join(self.remembered() or JournalContent(), self._in_memory)

    def _join(self, content: JournalContent, copy: IncidentCopy) -> JournalContent:
        """``content`` with what ``copy`` knows better, which is written into the journal then."""
        content, newer = joined(content, copy.read())
        with self._state:
            for incident in (*reversed(content.ended[:MAX_COPIED]), *content.current):
                self._note(incident)
        for incident in newer:
            self.incident(incident)
        return content

    def remembered(self) -> JournalContent | None:
        """What an earlier agent knew, once, as soon as it could be read; None before and after that."""
        with self._state:
            memory, self._memory = self._memory, None
            return memory

    def incident(self, incident: Incident) -> None:
        """Record the incident as it is now."""
        with self._state:
            self._incidents.pop(incident.id, None)
            self._incidents[incident.id] = incident
            self._note(incident)
            self._copied = False
            if len(self._incidents) > MAX_BACKLOG:
                del self._incidents[next(iter(self._incidents))]
                self.lost += 1
            self._state.notify_all()

    def copy(self) -> None:
        """Copy the incidents to memory, if one has changed: a disk that is full or hangs does not delay that."""
        if not self._copied:
            self._copied = True
            self._in_memory.save(self._to_copy())

    def _note(self, incident: Incident) -> None:
        """Have the incident copied as it is now; a closed one that goes on is copied as long as a current one."""
        over = incident.resolved_at is not None and (incident.closed is None or incident.closed.gone_at is not None)
        for kept in (self._current, self._ended):
            kept.pop(incident.id, None)
        kept = self._ended if over else self._current
        kept[incident.id] = incident
        if len(kept) > MAX_COPIED:
            del kept[next(iter(kept))]

    def _to_copy(self) -> Iterable[Incident]:
        with self._state:
            return [*self._ended.values(), *self._current.values()]

    def transition(self, t: Transition) -> None:
        """Record a change of state."""
        statement = "INSERT INTO transitions (incident, at, before, after, text) VALUES (?, ?, ?, ?, ?)"
        self._append((statement, (t.incident, t.at, t.before, t.after, t.text)))

    def repair(self, repair: RepairFact) -> None:
        """Record the repair as it is now; that replaces what was recorded of it."""
        document = json.dumps(asdict(repair), ensure_ascii=False)
        self._append(("INSERT OR REPLACE INTO repairs VALUES (?, ?, ?)", (repair.id, repair.opened_at, document)))

    def event(self, event: Event) -> None:
        """Record what kernel or driver has told: the window of the next agent begins with it."""
        with contextlib.suppress(TypeError, ValueError):
            values = self._boot, event.at, event_document(event)
            self._append(("INSERT INTO events (boot, at, document) VALUES (?, ?, ?)", values))
            self._events += 1
            if self._events % KEEP_EVENTS == 0:  # a kernel log can grow faster than the hourly cleaning
                self._append((FORGET_EVENTS, (KEEP_EVENTS,)))

    def window(self, kept: bytes) -> None:
        """Record what the next agent of this boot begins with: see ``kept_window``."""
        self._append(("INSERT OR REPLACE INTO window VALUES (0, ?, ?)", (self._boot, kept)))

    def clock_stepped(self, seconds: float) -> None:
        """Move the times of recorded events by a step of the wall clock."""
        self._append(("UPDATE events SET at = at + ?", (seconds,)))

    def action(self, incident: str, past: PastAction) -> Intention:
        """Record that an action begins, which must wait until that is on the disk."""
        statement = "INSERT INTO actions (incident, kind, verb, target, at, user) VALUES (?, ?, ?, ?, ?, ?)"
        intention = Intention(self._state)
        self._append((statement, (incident, past.kind, past.verb, past.target, past.at, past.user)), intention)
        return intention

    def flush(self, patience_s: float) -> bool:
        """Wait until everything recorded so far is written; False if that took longer."""
        with self._state:
            return self._state.wait_for(lambda: not self.backlog and self._writing_since is None, patience_s)

    def close(self, patience_s: float = 1.0) -> None:
        """Write the remaining records, for at most ``patience_s``."""
        if not self.problem:
            self.flush(patience_s)
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join(patience_s)

    def _append(self, row: Row, intention: Intention | None = None) -> None:
        with self._state:
            self._rows.append((row, intention))
            if len(self._rows) > MAX_BACKLOG:
                _, dropped = self._rows.pop(0)
                self.lost += 1
                if dropped is not None:
                    dropped.settle(written=False)
            self._state.notify_all()

    def _work(self) -> None:
        while not self._closing:
            try:
                with Store(self.path, self._wall(), self._boot) as store:
                    self._serve(store)
            except MovedError as error:
                self._set_problem(str(error))
            except InUseError as error:
                with self._state:
                    if not self._tried and not error.stuck:
                        self._refused, self._closing = error, True
                self._retry(str(error))
            except StoreError as error:
                self._retry(str(error))
            except Exception as error:  # the thread must outlive a bug, or nothing is written until a restart
                self._retry(f"{self.path} cannot be written, a bug in opsd: {type(error).__name__}: {error}")

    def _retry(self, problem: str) -> None:
        self._set_problem(problem)
        with self._state:
            self._tried = True
            self._state.notify_all()
            self._state.wait_for(lambda: self._closing, self._retry_s)

    def _serve(self, store: Store) -> None:
        """Write records to ``store`` until the journal is closed. Raises StoreError."""
        if not self._loaded:
            content = store.load(self._wall())
            self._memory = self._join(content, self._beside) if store.notices else content
            self._loaded = True
        self.opened += 1
        for notice in store.notices:
            self._tell(notice)
        forgot = time.monotonic()
        while True:
            self._write(store)
            if time.monotonic() - forgot > FORGETS_EVERY_S:
                forgot = time.monotonic()
                store.forget(self._wall())
            self._set_problem("")
            with self._state:
                self._tried = True
                self._state.notify_all()
                self._state.wait_for(lambda: self._closing or self.backlog > 0)
                if self._closing:
                    return

    def _write(self, store: Store) -> None:
        with self._state:
            incidents, records = self._incidents, self._rows
            self._incidents, self._rows = {}, []
            self._writing_since = time.monotonic()
        try:
            if incidents:
                self._beside.save(self._to_copy())
            refused, written = store.write(incidents.values(), [row for row, _ in records])
        except BaseException:
            with self._state:
                self._incidents = {**incidents, **self._incidents}
                self._rows = records + self._rows
            raise
        finally:
            self._writing_since = None
        with self._state:
            self.lost += refused + written.count(False)
            for (_, intention), kept in zip(records, written, strict=True):
                if intention is not None:
                    intention.settle(kept)

    def _set_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self._tell(problem)

    def _tell(self, sentence: str) -> None:
        with contextlib.suppress(Exception):
            self._on_problem(sentence)
