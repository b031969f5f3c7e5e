"""The journal: incidents, actions and transitions, written asynchronously.

The loop only puts records into memory; a thread writes them. A disk that is full, read-only or hung therefore never
stops the agent: unwritten records stay in a bounded backlog and are written when the disk is back. Records contain no
secrets, only what the API shows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from opsd.agent.incidents import Transition
from opsd.agent.policy import PastAction
from opsd.agent.store import JournalContent, Row, Store, StoreError
from opsd.runbooks.base import Incident

MAX_BACKLOG = 10_000
RETRY_S = 5.0


class Journal:
    """Records of one agent. Methods may be called from any thread; only ``open``, ``flush`` and ``close`` wait.

    ``problem`` says in one sentence why records are not being written, "" if they are; ``on_problem`` is called with
    it, from the writing thread, whenever it changes. ``lost`` counts records dropped because the backlog was full.
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
        self._memory: JournalContent | None = None
        self._incidents: dict[str, Incident] = {}
        self._rows: list[Row] = []
        self._state = threading.Condition()
        self._writing = self._closing = False
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)

    @property
    def backlog(self) -> int:
        """Records not written yet."""
        return len(self._incidents) + len(self._rows)

    def open(self, patience_s: float = 2.0) -> JournalContent:
        """Start writing and return the journal's content, which is empty if it cannot be read within ``patience_s``."""
        self._thread.start()
        with self._state:
            self._state.wait_for(lambda: self._memory is not None, patience_s)
            return self._memory or JournalContent()

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
        self._append((statement, (t.incident, t.at, t.before, t.after, t.text)))

    def action(self, incident: str, past: PastAction) -> None:
        """Record that an action was begun."""
        statement = "INSERT INTO actions (incident, kind, verb, target, at) VALUES (?, ?, ?, ?, ?)"
        self._append((statement, (incident, past.kind, past.verb, past.target, past.at)))

    def flush(self, patience_s: float) -> bool:
        """Wait until everything recorded so far is written; False if that took longer."""
        with self._state:
            return self._state.wait_for(lambda: not self.backlog and not self._writing, patience_s)

    def close(self, patience_s: float = 1.0) -> None:
        """Write the remaining records, for at most ``patience_s``."""
        if not self.problem:
            self.flush(patience_s)
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join(patience_s)

    def _append(self, row: Row) -> None:
        with self._state:
            self._rows.append(row)
            if len(self._rows) > MAX_BACKLOG:
                del self._rows[0]
                self.lost += 1
            self._state.notify_all()

    def _work(self) -> None:
        while not self._closing:
            try:
                with Store(self.path, self._wall()) as store:
                    self._serve(store)
            except StoreError as error:
                self._set_problem(str(error))
                with self._state:
                    self._memory = self._memory or JournalContent()
                    self._state.notify_all()
                    self._state.wait_for(lambda: self._closing, self._retry_s)

    def _serve(self, store: Store) -> None:
        """Write records to ``store`` until the journal is closed. Raises StoreError."""
        if store.aside is not None:
            self._on_problem(f"{self.path} is damaged; it was set aside as {store.aside.name} and a new one created")
        memory = self._memory or store.load(self._wall())
        while True:
            self._write(store)
            self._set_problem("")
            with self._state:
                self._memory = memory
                self._state.notify_all()
                self._state.wait_for(lambda: self._closing or self.backlog > 0)
                if self._closing:
                    return

    def _write(self, store: Store) -> None:
        with self._state:
            incidents, rows = self._incidents, self._rows
            self._incidents, self._rows = {}, []
            self._writing = True
        try:
            store.write(incidents.values(), rows)
        except StoreError:
            with self._state:
                self._incidents = {**incidents, **self._incidents}
                self._rows = rows + self._rows
            raise
        finally:
            self._writing = False

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._on_problem(problem)
