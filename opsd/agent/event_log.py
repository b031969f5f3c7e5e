"""The events that the window remembers: by kind and teller, with a bound for each kind and for what each user says."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from opsd.collectors.base import Event

MAX_WITNESSED: Final = 2_000
MAX_TOLD: Final = 500
"""Events of a kind that are kept of witnesses, and of all others; the oldest are dropped of the user who has most."""
USER_BYTES: Final = 1 << 20
USERS_BYTES: Final = 3 << 20
"""Size of the events kept of one user, and of all users, as they were read; in memory they take some six times that."""
STEPS: Final = 4
"""Steps of the clock across which an event that is read again is recognised."""

Teller = tuple[int | None, bool]
"""The user who reported an event (None: no user), and whether the source is a witness."""


class EventLog:
    """Used in one thread."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[Teller, deque[Event]]] = {}
        self._sizes: dict[int, int] = {}
        self._sorted: dict[str, list[Event]] = {}
        self._by_run: dict[str, dict[str, list[Event]]] = {}
        self._steps: deque[float] = deque(maxlen=STEPS)

    def add(self, event: Event, witness: bool) -> None:
        """Remember ``event``; what is too much then is forgotten.

        The files of a run may be read a second time, after its folder was restored: the same word counts once.
        """
        tellers = self._kinds.setdefault(event.kind, {})
        said = tellers.setdefault((event.user, witness), deque())
        if not witness and any(one.at == told.at and one == told for told in self._as_shifted(event) for one in said):
            return
        said.append(event)
        self._sorted.pop(event.kind, None)
        self._by_run.pop(event.kind, None)
        if event.user is not None:
            self._sizes[event.user] = self._sizes.get(event.user, 0) + event.size
            self._bound_users(event.user)
        alike = [teller for teller in tellers if teller[1] is witness]
        if sum(len(tellers[teller]) for teller in alike) > (MAX_WITNESSED if witness else MAX_TOLD):
            self._drop(event.kind, max(alike, key=lambda teller: len(tellers[teller])))

    def _as_shifted(self, event: Event) -> Iterator[Event]:
        """``event`` as it would be here if it had been added before one of the steps of the clock, or after all."""
        yield event
        steps = list(self._steps)
        for first in range(len(steps)):
            yield replace(event, at=sum(steps[first:], event.at))

    def shift(self, seconds: float) -> None:
        """Move the times of all events by a step of the wall clock."""
        self._steps.append(seconds)
        for tellers in self._kinds.values():
            for teller, events in tellers.items():
                tellers[teller] = deque(replace(event, at=event.at + seconds) for event in events)
        self._sorted.clear()
        self._by_run.clear()

    def since(self, kind: str, oldest: float, run: str | None = None) -> Sequence[Event]:
        """Events of ``kind`` from the wall second ``oldest`` on, oldest first; with ``run`` those about it."""
        if kind not in self._kinds:
            return ()
        found = self._of_run(kind, run) if run is not None else self._of_kind(kind)
        return found[bisect_left(found, oldest, key=lambda event: event.at) :]

    def witnessed(self, kind: str, oldest: float, run: str | None = None) -> Sequence[Event]:
        """The same, of those that a witness told."""
        told = (events for (_, witness), events in self._kinds.get(kind, {}).items() if witness)
        return _in_order(e for events in told for e in events if e.at >= oldest and run in (None, e.data.get("run")))

    def _of_kind(self, kind: str) -> list[Event]:
        if kind not in self._sorted:
            self._sorted[kind] = _in_order(e for events in self._kinds[kind].values() for e in events)
        return self._sorted[kind]

    def _of_run(self, kind: str, run: str) -> list[Event]:
        """Runbooks ask for each run; going through all events for each of them took longer than a tick."""
        if kind not in self._by_run:
            runs = self._by_run[kind] = defaultdict(list)
            for event in self._of_kind(kind):
                if isinstance(name := event.data.get("run"), str):
                    runs[name].append(event)
        return self._by_run[kind].get(run, [])

    def _bound_users(self, user: int) -> None:
        while self._sizes[user] > USER_BYTES:
            self._drop_of(user)
        while sum(self._sizes.values()) > USERS_BYTES:
            self._drop_of(max(self._sizes, key=lambda one: self._sizes[one]))

    def _drop_of(self, user: int) -> None:
        """Drop the oldest event of the kind of which the user has most."""
        theirs = (
            (len(events), kind, teller)
            for kind, tellers in self._kinds.items()
            for teller, events in tellers.items()
            if teller[0] == user
        )
        _, kind, teller = max(theirs)
        self._drop(kind, teller)

    def _drop(self, kind: str, teller: Teller) -> None:
        events = self._kinds[kind][teller]
        dropped = events.popleft()
        if not events:
            del self._kinds[kind][teller]
        if dropped.user is not None:
            self._sizes[dropped.user] -= dropped.size
            if not self._sizes[dropped.user]:
                del self._sizes[dropped.user]
        self._sorted.pop(kind, None)
        self._by_run.pop(kind, None)


def _in_order(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.at)
