"""The life of an incident, as pure functions of what was found and when.

::

    found for open_after_s                     every outcome in                 healed for clear_after_s
    ---------------------> open -----> acting -----------------> verifying ------------------------------> resolved
                           ^  | policy admits                     |      |
                           |  | a remedy                          |      | verify_s over, max_attempts made
                           |  |                                   |      v
                           |  +-- healed for clear_after_s -------|---> escalated (a person's turn)
                           |      (resolved), or nothing to do    |
                           |      for verify_s (escalated)        |
                           +----- verify_s over, attempts left ---+

Resolved and escalated are final. An escalated incident stays current, and keeps the same trouble from opening another
one, until it is healed: ``resolved_at`` then says when. A healed answer of None (not known) never counts as healed.

An incident that was over and is found again within ``hold_s`` goes on as the same one, and is escalated the
``max_relapses``-th time. A symptom whose cause is current is held: it neither ends nor escalates before its cause ends.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opsd.runbooks.base import Cost, Evidence, Finding, Incident, Severity, State

MAX_EVIDENCE = 24
"""Sentences kept; those it was opened with take two thirds at most."""
MAX_ACTIONS = 50
GIVE_UP_S = 3600.0
"""An incident that was neither found nor could be judged for this long ends, escalated: the run may have vanished."""
COST_GAP_S = 10.0
"""Longest time between two findings over which their cost is taken to have gone on."""
PENDING_GAP_S = 2.5
"""A finding that is not yet an incident may be missing for this long (two ticks) without starting anew."""

_SEVERITIES = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)
RESTARTED = "the agent was restarted while this was under way; whether it was carried out is not known"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the reducer needs to know of a runbook; see ``runbooks.base.Runbook``. Seconds."""

    open_after_s: float = 0.0
    clear_after_s: float = 5.0
    verify_s: float = 60.0
    max_attempts: int = 2
    hold_s: float = 0.0
    max_relapses: int = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one action of an incident; ``number`` is its place in ``Incident.actions``."""

    incident: str
    number: int
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of an incident's state, or its end. ``before`` is None when it was opened.

    An escalated incident stays escalated when it ends: see ``is_over``.
    """

    incident: str
    kind: str
    before: State | None
    after: State
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Observed:
    """What one tick says about current incidents, by incident id; an id that is missing is not known to be healed.

    ``idle`` are open incidents whose runbook has nothing to do, ``held`` those whose cause is current.
    """

    findings: Sequence[Finding] = ()
    healed: Mapping[str, bool | None] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    outcomes: Sequence[Outcome] = ()
    held: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Book:
    """Current incidents by (kind, key), and since when and until when a finding has been seen that is not one yet.

    ``recent`` are the incidents that ended last and that may still come back. ``watching_since`` is when the agent
    started: what was not seen before that says nothing, so no wait ends because of it.
    """

    incidents: Mapping[tuple[str, str], Incident] = field(default_factory=dict)
    pending: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    recent: Mapping[tuple[str, str], Incident] = field(default_factory=dict)
    watching_since: float = 0.0


def is_current(incident: Incident) -> bool:
    """True until the trouble is over."""
    return incident.resolved_at is None


def is_over(incident: Incident, transition: Transition) -> bool:
    """True if ``transition`` is the end of the trouble, be it that opsd or a person has seen to it."""
    escalated = transition.before is State.ESCALATED and not is_current(incident)
    return escalated or transition.after is State.RESOLVED


def reduce(
    book: Book, observed: Observed, rules: Mapping[str, Rules], now: float
) -> tuple[Book, tuple[Incident, ...], tuple[Transition, ...]]:
    """One tick: the new book, the incidents that ended in it, and every change of state. ``now`` is epoch seconds."""
    found = {(finding.kind, finding.key): finding for finding in observed.findings}
    outcomes: dict[str, list[Outcome]] = {}
    for outcome in observed.outcomes:
        outcomes.setdefault(outcome.incident, []).append(outcome)
    current: dict[tuple[str, str], Incident] = {}
    ended: list[Incident] = []
    transitions: list[Transition] = []
    for name, incident in book.incidents.items():
        rule = rules.get(incident.kind, Rules())
        after = _settle(incident, outcomes.get(incident.id, ()), rule, now)
        finding = found.get(name)
        if finding is not None:
            after = _merge(after, finding, now)
        after = _judge(after, observed, finding is not None, rule, book.watching_since, now)
        if after.state != incident.state or not is_current(after):
            transitions.append(_transition(incident.state, after, now))
        if is_current(after):
            current[name] = after
        else:
            ended.append(after)
    pending, recent = _waiting(book, found, now), _holding(book, rules, now)
    for name, finding in found.items():
        rule = rules.get(finding.kind, Rules())
        if name in book.incidents or now - pending[name][0] < rule.open_after_s:
            continue
        del pending[name]
        old = recent.pop(name, None)
        current[name] = _open(finding, now) if old is None else _reopen(old, finding, rule, now)
        transitions.append(_transition(None if old is None else old.state, current[name], now))
    recent |= {(incident.kind, incident.key): incident for incident in ended}
    return Book(current, pending, recent, book.watching_since), tuple(ended), tuple(transitions)


def started(incident: Incident, actions: Iterable[Mapping[str, object]], now: float) -> Incident:
    """The incident once ``actions`` (as recorded, outcome "running") have been set in motion."""
    return replace(
        incident,
        state=State.ACTING,
        acted_at=now,
        attempts=incident.attempts + 1,
        actions=(*incident.actions, *actions),
    )


def noted(incident: Incident, actions: Iterable[Mapping[str, object]]) -> Incident:
    """The incident with actions that were only recommended, or refused; nothing is noted twice."""
    known = {_same(action) for action in incident.actions}
    new = [action for action in actions if _same(action) not in known]
    room = MAX_ACTIONS - len(incident.actions)
    return replace(incident, actions=(*incident.actions, *new[:room])) if new and room > 0 else incident


def resumed(incident: Incident, now: float) -> Incident:
    """The incident as loaded after a restart of the agent: what was under way has an unknown end and is verified.

    Whether it stayed healthy meanwhile is not known, so it has to be for the whole time again.
    """
    incident = replace(incident, healthy_since=None)
    if incident.state is not State.ACTING:
        return incident
    actions = tuple(
        {**action, "outcome": "unknown", "detail": RESTARTED} if action.get("outcome") == "running" else action
        for action in incident.actions
    )
    return replace(incident, state=State.VERIFYING, acted_at=now, actions=actions, verdict=RESTARTED)


def shifted(book: Book, seconds: float) -> Book:
    """The book after a step of the wall clock by ``seconds``, so that no hold time is cut short or stretched."""
    return Book(
        {name: _shifted(incident, seconds) for name, incident in book.incidents.items()},
        {name: (a + seconds, b + seconds) for name, (a, b) in book.pending.items()},
        {name: _shifted(incident, seconds) for name, incident in book.recent.items()},
        book.watching_since + seconds,
    )


def _shifted(incident: Incident, seconds: float) -> Incident:
    """The incident with its evidence moved as well: what it was opened with is told by the times."""

    def moved(at: float | None) -> float | None:
        return None if at is None else at + seconds

    return replace(
        incident,
        opened_at=incident.opened_at + seconds,
        last_seen_at=incident.last_seen_at + seconds,
        evidence=tuple(replace(evidence, at=evidence.at + seconds) for evidence in incident.evidence),
        healthy_since=moved(incident.healthy_since),
        acted_at=moved(incident.acted_at),
        reopened_at=moved(incident.reopened_at),
        resolved_at=moved(incident.resolved_at),
    )


def _same(action: Mapping[str, object]) -> tuple[object, ...]:
    return action.get("verb"), action.get("target"), action.get("outcome"), action.get("detail")


def _transition(before: State | None, incident: Incident, now: float) -> Transition:
    text = incident.summary if before is None else incident.verdict
    return Transition(incident.id, incident.kind, before, incident.state, now, text)


def _waiting(
    book: Book, found: Mapping[tuple[str, str], Finding], now: float
) -> dict[tuple[str, str], tuple[float, float]]:
    pending = {name: seen for name, seen in book.pending.items() if now - seen[1] <= PENDING_GAP_S}
    for name in found:
        if name not in book.incidents:
            pending[name] = (pending[name][0] if name in pending else now, now)
    return pending


def _holding(book: Book, rules: Mapping[str, Rules], now: float) -> dict[tuple[str, str], Incident]:
    """The ended incidents that are still within their hold time."""
    return {
        name: incident
        for name, incident in book.recent.items()
        if incident.resolved_at is not None and now - incident.resolved_at < rules.get(name[0], Rules()).hold_s
    }


def _reopen(old: Incident, finding: Finding, rule: Rules, now: float) -> Incident:
    """The incident ``old``, which is back. One that a person was called for stays with the person."""
    relapses = old.relapses + 1
    flapping = relapses >= rule.max_relapses
    back = replace(
        old,
        state=State.ESCALATED if flapping or old.state is State.ESCALATED else State.OPEN,
        verdict=f"came back within {rule.hold_s:.0f} s, {relapses} time{'s' * (relapses != 1)} so far",
        relapses=relapses,
        reopened_at=now,
        last_seen_at=now,
        healthy_since=None,
        resolved_at=None,
        cause=None,
    )
    return _merge(back, finding, now)


def _open(finding: Finding, now: float) -> Incident:
    digest = hashlib.blake2s(f"{finding.kind} {finding.key} {now!r}".encode(), digest_size=3).hexdigest()
    return Incident(
        id=f"{finding.kind}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}-{digest}",
        kind=finding.kind,
        key=finding.key,
        severity=finding.severity,
        state=State.OPEN,
        summary=finding.summary,
        culprit=finding.culprit,
        confidence=finding.confidence,
        evidence=finding.evidence[: 2 * MAX_EVIDENCE // 3],
        cost=finding.cost,
        job=finding.job,
        opened_at=now,
        last_seen_at=now,
        data=finding.data,
    )


def _merge(incident: Incident, finding: Finding, now: float) -> Incident:
    """What a further finding adds. A surer diagnosis replaces the culprit; severity and cost never shrink."""
    surer = finding.confidence >= incident.confidence
    return replace(
        incident,
        severity=max(incident.severity, finding.severity, key=_SEVERITIES.index),
        summary=finding.summary if surer else incident.summary,
        culprit=finding.culprit if surer else incident.culprit,
        confidence=max(incident.confidence, finding.confidence),
        evidence=_evidence(incident, finding),
        cost=_cost(incident.cost, finding.cost, now - incident.last_seen_at),
        job=finding.job or incident.job,
        last_seen_at=now,
        data={**incident.data, **finding.data},
    )


def _cost(before: Cost, now: Cost, seconds: float) -> Cost:
    """The loss so far: what the finding knows of it, or what the share lost adds up to if that is more.

    A finding knows no more than its window, so that an incident of hours needs the sum.
    """
    added = now.throughput_ratio * now.gpus * min(max(seconds, 0.0), COST_GAP_S)
    return replace(now, gpu_seconds=max(now.gpu_seconds, before.gpu_seconds + added))


def _evidence(incident: Incident, finding: Finding) -> tuple[Evidence, ...]:
    """What the incident was opened with, then what is found now; the numbers in between are in the metrics."""
    opening = tuple(evidence for evidence in incident.evidence if evidence.at <= incident.opened_at)
    return opening + tuple(e for e in finding.evidence if e not in opening)[: MAX_EVIDENCE - len(opening)]


def _settle(incident: Incident, outcomes: Sequence[Outcome], rule: Rules, now: float) -> Incident:
    """Take in the outcomes of actions. When the last is in, the effect is verified or a failure tried again."""
    if not outcomes or incident.state is not State.ACTING:
        return incident
    actions = list(incident.actions)
    for outcome in outcomes:
        state = "ok" if outcome.ok else "failed"
        actions[outcome.number] = {
            **actions[outcome.number],
            "outcome": state,
            "detail": outcome.detail,
            "ended_at": now,
        }
    after = replace(incident, actions=tuple(actions))
    if any(action.get("outcome") == "running" for action in actions):
        return after
    failures = [outcome.detail for outcome in outcomes if not outcome.ok]
    if failures and incident.attempts < rule.max_attempts:
        return replace(after, state=State.OPEN, verdict=f"attempt {incident.attempts} failed: {failures[0]}")
    verdict = f"failed: {failures[0]}" if failures else "acted, waiting for the effect"
    return replace(after, state=State.VERIFYING, acted_at=now, verdict=verdict)


def _judge(
    incident: Incident, observed: Observed, found: bool, rule: Rules, watching_since: float, now: float
) -> Incident:
    answer = observed.healed.get(incident.id)
    healed = answer is True
    since = (incident.healthy_since if incident.healthy_since is not None else now) if healed else None
    incident = replace(incident, healthy_since=since) if since != incident.healthy_since else incident
    if incident.id in observed.held:
        return incident
    if since is not None and now - since >= rule.clear_after_s and not found and incident.state is not State.ACTING:
        return _end(incident, now)
    unseen_since = max(incident.last_seen_at, watching_since)
    if answer is None and incident.state is not State.ACTING and now - unseen_since >= GIVE_UP_S:
        verdict = f"given up: nothing is known of it for {GIVE_UP_S / 60:.0f} minutes"
        return replace(incident, state=State.ESCALATED, resolved_at=now, verdict=verdict)
    if incident.state is State.VERIFYING and not healed:
        return _after_attempt(incident, rule, watching_since, now)
    begun = [at for at in (incident.acted_at, incident.reopened_at) if at is not None]
    idle_since = max(watching_since, max(begun, default=incident.opened_at))
    if (
        incident.state is State.OPEN
        and incident.id in observed.idle
        and not healed
        and now - idle_since >= rule.verify_s
    ):
        return replace(incident, state=State.ESCALATED, verdict=f"not over after {rule.verify_s:.0f} s")
    return incident


def _after_attempt(incident: Incident, rule: Rules, watching_since: float, now: float) -> Incident:
    assert incident.acted_at is not None
    if now - max(incident.acted_at, watching_since) < rule.verify_s:
        return incident
    tries = "attempt" if incident.attempts == 1 else "attempts"
    verdict = f"not over {rule.verify_s:.0f} s after {incident.attempts} {tries}"
    state = State.OPEN if incident.attempts < rule.max_attempts else State.ESCALATED
    return replace(incident, state=state, verdict=verdict)


def _end(incident: Incident, now: float) -> Incident:
    if incident.state is State.ESCALATED:
        return replace(incident, resolved_at=now, verdict=f"{incident.verdict}; over since")
    verdict = "over by itself" if incident.attempts == 0 else f"over after attempt {incident.attempts}"
    return replace(incident, state=State.RESOLVED, resolved_at=now, verdict=verdict)
