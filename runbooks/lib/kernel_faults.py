"""Runbooks about what the kernel log says: a table of the events that are a fault, and the incident made of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from opsd.collectors.base import Event, RankFact
from opsd.runbooks.base import DRAIN, Action, Cause, Cost, Culprit, Evidence, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.remedies import drain_only, notify_node
from opsd.runbooks.lib.runs import live_ranks
from opsd.runbooks.lib.signals import grouped, integer, latest, number, text

BOOT_TIME = "opsd_host_boot_time_seconds"
HOUR_S, DAY_S = 3600.0, 86_400.0
_SOURCES: Mapping[str, str] = {"kmsg": "kernel log"}
QUOTED = 4
"""Lines of the log that an incident quotes: the newest."""

Data = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Row:
    """Events that are a fault: ``at_least`` of kind ``event`` for which ``when`` holds, within ``within_s`` seconds.

    An event is of the first row of its table that fits.
    The fault counts as over once that time has passed without them, or the node was booted. ``about`` is the field that
    says what they are about, "" for the node. ``what`` describes the fault; its placeholders are fields of the event.
    ``apart_s`` demands that the first and the last lie so far apart. A ``critical`` fault takes the node out; if what
    runs can ``go_on``, the node is drained, but not swapped out of its runs.
    """

    event: str
    what: str
    when: Callable[[Data], bool] = lambda _data: True
    about: str = ""
    at_least: int = 1
    within_s: float = DAY_S
    apart_s: float = 0.0
    critical: bool = False
    go_on: bool = False


@dataclass(frozen=True, slots=True)
class KernelFault:
    """The events of one row about one thing."""

    row: Row
    about: str
    events: Sequence[Event]

    @property
    def what(self) -> str:
        """The row's description with the fields of the newest event."""
        return " ".join(self.row.what.format_map(_Fields(self.events[-1].data)).split())


class _Fields(dict[str, object]):
    """The data of an event; what it does not have is an empty text."""

    def __missing__(self, key: str) -> str:
        return ""


CulpritOf = Callable[[View, KernelFault], tuple[Culprit, RankFact | None]]
"""Culprit of a fault, and the rank that it hits, if it hits one alone."""


def has(key: str, *values: str) -> Callable[[Data], bool]:
    """Whether the field ``key`` of an event is one of ``values``."""
    return lambda data: text(data, key) in values


def matches(key: str, pattern: str) -> Callable[[Data], bool]:
    """Whether ``pattern`` is found in the field ``key`` of an event."""
    return lambda data: re.search(pattern, text(data, key)) is not None


def lacks(key: str, pattern: str) -> Callable[[Data], bool]:
    """Whether it is not."""
    return lambda data: re.search(pattern, text(data, key)) is None


def _times(event: Event) -> int:
    """The number of errors in the event: equal lines are one event, and a line of EDAC may count several errors."""
    return integer(event.data, "count", 1) * integer(event.data, "errors", 1)


Whole = Callable[[View], Callable[[str], str]]
"""What a thing that a fault is about belongs to."""

Ignored = Callable[[View], Callable[[Event], bool]]
"""Which events are about something else."""


def _nothing(_view: View) -> Callable[[Event], bool]:
    return lambda _event: False


@dataclass(frozen=True, slots=True)
class Lasting:
    """Faults that ``collector`` sees as long as they last, whatever the log has said.

    ``find`` returns those that have been there for at least as many seconds as its argument. One that has been there
    for ``after_s`` is an incident, which is over once none is there, however young.
    """

    collector: str
    find: Callable[[View, float], Iterable[KernelFault]]
    after_s: float = 0.0


def lasting_fault(view: View, row: Row, about: str, said: str, source: str, **data: object) -> KernelFault:
    """A fault of ``row`` that is there now; ``said`` is its evidence, from ``source``."""
    return KernelFault(row, about, (Event(row.event, view.wall, said, {**data, "source": source}),))


def _row_of(event: Event, rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row.event == event.kind and row.when(event.data)), None)


def faults(view: View, rows: Sequence[Row], ignored: Ignored = _nothing) -> Iterator[KernelFault]:
    """The findings of ``rows`` in the log since the boot."""
    booted, elsewhere = None, _nothing(view)
    for row in rows:
        events = view.events(row.event, row.within_s)
        if not events:
            continue
        if booted is None:
            booted, elsewhere = latest(view, BOOT_TIME) or 0.0, ignored(view)
        found: dict[str, list[Event]] = {}
        for event in events:
            if event.at > booted and _row_of(event, rows) is row and not elsewhere(event):
                found.setdefault(text(event.data, row.about) if row.about else "", []).append(event)
        for about, of_it in found.items():
            if sum(map(_times, of_it)) >= row.at_least and of_it[-1].at - of_it[0].at >= row.apart_s:
                yield KernelFault(row, about, of_it)


def kernel_runbook(
    rows: Sequence[Row],
    *,
    component: str = "node",
    advice: str,
    cost: str = "",
    culprit_of: CulpritOf | None = None,
    causes: Sequence[Cause] = (),
    ignored: Ignored = _nothing,
    lasting: Lasting | None = None,
    beside: str = "",
    whole: Whole = lambda _view: str,
    first: tuple[str, ...] = (DRAIN,),
) -> Runbook:
    """The runbook of the incident that ``rows`` describe.

    One incident for each thing that they are about, or for the ``whole`` that it belongs to. ``component`` is its
    culprit's unless ``culprit_of`` names another. ``lasting`` finds more than the log says. Events of the kind
    ``beside`` are evidence and no fault. The node is swapped out if the incident is critical. ``advice`` ends the
    notification, ``cost`` is what is at stake for a job on the node.
    """

    def of_component(view: View, fault: KernelFault) -> tuple[Culprit, RankFact | None]:
        return Culprit(component, view.node, detail=fault.about), None

    def detect(view: View) -> Iterator[Finding]:
        lasted = lasting.find(view, lasting.after_s) if lasting else ()
        belongs_to = whole(view)
        found = grouped((*faults(view, rows, ignored), *lasted), lambda fault: belongs_to(fault.about))
        for about, several in found.items():
            yield finding(view, about, sorted(several, key=lambda fault: not fault.row.critical))

    def finding(view: View, about: str, several: Sequence[KernelFault]) -> Finding:
        worst = several[0]
        culprit, rank = (culprit_of or of_component)(view, worst)
        jobs = [fact.job for fact in live_ranks(view)]
        lasts = any(fault.row.within_s == 0.0 for fault in several)
        events = sorted((event for fault in several for event in fault.events), key=lambda event: event.at)
        return Finding(
            key=f"{view.node}/{about}",
            severity=Severity.CRITICAL if worst.row.critical else Severity.WARNING,
            summary=f"{view.node}: {' and '.join(dict.fromkeys(fault.what for fault in several))}",
            culprit=culprit,
            confidence=0.9,
            evidence=tuple(
                Evidence(event.message, _SOURCES.get(said := text(event.data, "source"), said), event.at)
                for event in (*events[-QUOTED:], *(view.events(beside, HOUR_S)[-QUOTED:] if beside else ()))
            ),
            cost=Cost(text=cost if jobs else ""),
            job=rank.job if rank else text(events[-1].data, "job") or next(iter(jobs), ""),
            struck_at=None if lasts else events[-1].at,
            data={
                "about": about, "at": events[-1].at, "quiet_s": max(fault.row.within_s for fault in several),
                "lasts": lasts, "go_on": all(fault.row.go_on for fault in several if fault.row.critical),
            },
        )  # fmt: skip

    def healed(incident: Incident, view: View) -> bool | None:
        booted = latest(view, BOOT_TIME)
        last = number(incident.data, "at") or incident.opened_at
        there = (*faults(view, rows, ignored), *(lasting.find(view, 0.0) if lasting else ()))
        if any(whole(view)(fault.about) == text(incident.data, "about") for fault in there):
            return False
        if lasting and incident.data.get("lasts") and not view.known(lasting.collector):
            return None
        if booted is not None and booted > last:
            return True
        return True if view.known("kmsg") and view.wall - last >= (number(incident.data, "quiet_s") or 0.0) else None

    def remedy(incident: Incident, view: View) -> Sequence[Action]:
        critical, go_on = incident.severity == Severity.CRITICAL, bool(incident.data.get("go_on"))
        drain = (drain_only(incident, view),) if critical and go_on else ()
        return (*drain, *notify_node(advice, swap=critical and not go_on)(incident, view))

    return Runbook(
        detect=detect, remedy=remedy, healed=healed, needs=("kmsg",), verify_s=HOUR_S, causes=tuple(causes), first=first
    )
