"""The incidents of a node: one tick applies findings, outcomes and health to all of them. Pure; see ``lifecycle``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from opsd.agent import lifecycle
from opsd.agent.lifecycle import IncidentRules, Observed, Outcome
from opsd.runbooks.base import Finding, Incident, State

SETTLED_S = 7 * 86_400.0
"""How long the end of an incident is remembered; no runbook looks further back for events."""

PENDING_GAP_S = 2.5
"""A finding that is not yet an incident may be missing for this long (two ticks) before its time starts over."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of an incident's state, its end, or that it has become ``worse``. ``before`` is None when it was opened.

    An escalated incident stays escalated when it ends: see ``is_over``.
    """

    incident: str
    kind: str
    before: State | None
    after: State
    at: float
    text: str
    worse: bool = False


@dataclass(frozen=True, slots=True)
class IncidentTable:
    """Current incidents by (kind, key). ``pending`` has when findings without an incident were first and last seen.

    ``recent`` are ended incidents that may still come back. ``watching_since`` is when the agent started: no wait ends
    because of the time before it. ``settled`` has when the newest event struck that an ended incident rested on: no
    older evidence opens it a second time. ``closed`` has incidents that a person closed and whose evidence goes on.
    """

    incidents: Mapping[tuple[str, str], Incident] = field(default_factory=dict)
    pending: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    recent: Mapping[tuple[str, str], Incident] = field(default_factory=dict)
    watching_since: float = 0.0
    settled: Mapping[tuple[str, str], float] = field(default_factory=dict)
    closed: Mapping[tuple[str, str], Incident] = field(default_factory=dict)


def is_over(incident: Incident, transition: Transition) -> bool:
    """True if ``transition`` ends the fault, whether opsd or a person has fixed it."""
    escalated = transition.before is State.ESCALATED and not lifecycle.is_current(incident)
    return escalated or transition.after in (State.RESOLVED, State.UNPROVEN)


def news(incident: Incident, transition: Transition) -> str:
    """What people are to be told of ``transition``, which is the state on their page; "" for nothing.

    They hear of an incident again if it is worse, if nobody has it any more, or if opsd was to act and could not end
    it. They hear of its end if they know of it, but only of the first end of one that comes and goes.
    """
    over = is_over(incident, transition)
    if not lifecycle.is_current(incident):
        known = incident.untold != "opened" and not (incident.relapses and over)
        return ("over" if over and transition.after is State.ESCALATED else transition.after.value) if known else ""
    if transition.before is None or transition.worse or transition.before is transition.after:
        again = f"{transition.after.value}; {transition.text}"
        return "opened" if transition.before is None else "worse" if transition.worse else again
    if transition.after is State.VERIFYING and lifecycle.failure(incident):
        return "failed"
    acted = lifecycle.carried_out(incident) and not lifecycle.failure(incident)
    return "escalated" if transition.after is State.ESCALATED and (acted or incident.relapses) else ""


def turn_of(incident: Incident) -> str:
    """Whose turn it is when something is done for this incident: its run's, else that of its kind."""
    return f"run {incident.run}" if incident.run else incident.kind


def reduce(
    table: IncidentTable, observed: Observed, rules: Mapping[str, IncidentRules], now: float
) -> tuple[IncidentTable, tuple[Incident, ...], tuple[Transition, ...]]:
    """One tick: the new table, the incidents that ended in it, and every change of state. ``now`` is epoch seconds."""
    told = {(finding.kind, finding.key): finding for finding in observed.findings}
    closed = dict(_still_closed(table, told, observed, rules, now))
    found = {name: finding for name, finding in told.items() if name not in closed and _is_new(table, finding)}
    outcomes: dict[str, list[Outcome]] = {}
    for outcome in observed.outcomes:
        outcomes.setdefault(outcome.incident, []).append(outcome)
    current: dict[tuple[str, str], Incident] = {}
    ended: list[Incident] = []
    transitions: list[Transition] = []
    for name, incident in table.incidents.items():
        rule = rules.get(incident.kind, IncidentRules())
        after = lifecycle.settled(incident, outcomes.get(incident.id, ()), rule, now)
        finding = found.get(name)
        worse = finding is not None and lifecycle.rises(after, finding)
        if finding is not None:
            after = lifecycle.merged(after, finding, now)
        after = lifecycle.judged(after, observed, finding is not None, rule, table.watching_since, now)
        if worse:
            text = f"worse: {after.summary}"
            transitions.append(Transition(after.id, after.kind, incident.state, after.state, now, text, worse=True))
        elif after.state != incident.state or not lifecycle.is_current(after):
            transitions.append(_transition(incident.state, after, now))
        if lifecycle.is_current(after):
            current[name] = after
        else:
            ended.append(after)
    pending, recent = _waiting(table, found, now), _holding(table, rules, now)
    for name, finding in found.items():
        rule = rules.get(finding.kind, IncidentRules())
        if name in table.incidents or now - pending[name][0] < max(rule.open_after_s, finding.lasting_s):
            continue
        del pending[name]
        old = recent.pop(name, None)
        current[name] = lifecycle.opened(finding, now) if old is None else lifecycle.reopened(old, finding, rule, now)
        transitions.append(_transition(None if old is None else old.state, current[name], now))
    recent |= {(incident.kind, incident.key): incident for incident in ended}
    settled = table.settled
    if ended:
        kept = {name: at for name, at in settled.items() if now - at < SETTLED_S}
        settled = kept | settled_by(ended, now)
    return (
        IncidentTable(current, pending, recent, table.watching_since, settled, closed),
        tuple(ended),
        tuple(transitions),
    )


def close(
    table: IncidentTable, incident: Incident, by: str, reason: str, now: float
) -> tuple[IncidentTable, Incident, Transition]:
    """End the current ``incident`` for a person: the new table, the incident, its transition. Raises ByHandError."""
    after = lifecycle.closed(incident, by, reason, now)
    name = (incident.kind, incident.key)
    current = {other: kept for other, kept in table.incidents.items() if other != name}
    settled = {**table.settled, **settled_by([after], now)}
    kept = replace(table, incidents=current, settled=settled, closed={**table.closed, name: after})
    return kept, after, _transition(incident.state, after, now)


def _still_closed(
    table: IncidentTable,
    found: Mapping[tuple[str, str], Finding],
    observed: Observed,
    rules: Mapping[str, IncidentRules],
    now: float,
) -> Iterator[tuple[tuple[str, str], Incident]]:
    for name, old in table.closed.items():
        clear_after_s = rules.get(old.kind, IncidentRules()).clear_after_s
        lost = now - max(old.last_seen_at, table.watching_since) >= lifecycle.GIVE_UP_S
        healed = observed.healed.get(old.id)
        after = lifecycle.still_closed(old, found.get(name), healed, clear_after_s, lost, now)
        if after is not None:
            yield name, after


SAME_STRIKE_S = 5.0
"""An event that is read again may have another time: the kernel tells it since the boot, and the clock is adjusted."""


def settled_by(ended: Iterable[Incident], now: float) -> dict[tuple[str, str], float]:
    """When the newest event of each of the ``ended`` incidents struck; at most ``now``, as clocks can be ahead."""
    found: dict[tuple[str, str], float] = {}
    for incident in ended:
        if incident.struck_at is not None and now - incident.struck_at < SETTLED_S:
            name = (incident.kind, incident.key)
            found[name] = max(found.get(name, -inf), min(incident.struck_at, now))
    return found


def _is_new(table: IncidentTable, finding: Finding) -> bool:
    """False for evidence whose incident has ended: a proof of health that was seen stays one."""
    name = (finding.kind, finding.key)
    if name in table.incidents or finding.struck_at is None:
        return True
    return finding.struck_at > table.settled.get(name, -inf) + SAME_STRIKE_S


def cost_growth(before: IncidentTable, after: IncidentTable) -> Iterator[tuple[str, float]]:
    """Kind and GPU-seconds of what has been lost between two tables; symptoms are left out, their cause is counted."""
    for name, incident in after.incidents.items():
        old = before.incidents.get(name) or before.recent.get(name)
        grown = incident.cost.gpu_seconds - (old.cost.gpu_seconds if old and old.id == incident.id else 0.0)
        if grown > 0 and incident.cause is None:
            yield incident.kind, grown


def shifted(table: IncidentTable, seconds: float) -> IncidentTable:
    """The table after a step of the wall clock by ``seconds``, so that no wait becomes shorter or longer."""
    return IncidentTable(
        {name: lifecycle.shifted(incident, seconds) for name, incident in table.incidents.items()},
        {name: (a + seconds, b + seconds) for name, (a, b) in table.pending.items()},
        {name: lifecycle.shifted(incident, seconds) for name, incident in table.recent.items()},
        table.watching_since + seconds,
        {name: at + seconds for name, at in table.settled.items()},
        {name: lifecycle.shifted(incident, seconds) for name, incident in table.closed.items()},
    )


def _transition(before: State | None, incident: Incident, now: float) -> Transition:
    text = incident.summary if before is None else incident.verdict
    return Transition(incident.id, incident.kind, before, incident.state, now, text)


def _waiting(
    table: IncidentTable, found: Mapping[tuple[str, str], Finding], now: float
) -> dict[tuple[str, str], tuple[float, float]]:
    pending = {name: seen for name, seen in table.pending.items() if now - seen[1] <= PENDING_GAP_S}
    for name in found:
        if name not in table.incidents:
            pending[name] = (pending[name][0] if name in pending else now, now)
    return pending


def _holding(table: IncidentTable, rules: Mapping[str, IncidentRules], now: float) -> dict[tuple[str, str], Incident]:
    """The ended incidents within their hold time."""
    return {
        name: incident
        for name, incident in table.recent.items()
        if incident.resolved_at is not None and now - incident.resolved_at < rules.get(name[0], IncidentRules()).hold_s
    }
