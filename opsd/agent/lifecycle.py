"""The life of one incident, as pure functions of findings, time and what people say of it.

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

A finding that is graver than all before reopens an incident from any of these states, with all its attempts. If actions
are under way, it is reopened once they have ended.

Resolved, unproven and escalated are final. Some faults can only be seen while a run trains or a GPU works. Their
incidents end as unproven once that has ended for UNPROVEN_S, and are not escalated before. They are reopened if the
fault comes back. An escalated incident
stays current until it is healed, so that the same fault opens no second one; ``resolved_at`` then says when. A healed
answer of None (not known) never counts as healed.

An incident that is found again within ``hold_s`` of its end is reopened, and is escalated the ``max_relapses``-th time.
A symptom whose cause is current is held: it neither ends nor escalates before its cause ends.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from opsd.agent.policy import HARMLESS
from opsd.runbooks.base import Acknowledgement, Closing, Cost, Culprit, Evidence, Finding, Incident, Severity, State
from opsd.runbooks.lib.losses import followed
from opsd.words import clock, duration

MAX_EVIDENCE = 24
"""Limit of sentences; those from the opening take at most two thirds."""
MAX_ACTIONS = 50
GIVE_UP_S = 3600.0
"""An incident that was neither found nor known to be healed for this long ends as escalated: its run may be gone."""
UNPROVEN_S = 30.0
"""Seconds after the end of a run, or of a GPU's load, from which an incident that only they could prove is unproven."""
COST_GAP_S = 10.0
"""Longest time between two findings for which their cost is assumed to continue."""
TIMES = ("opened_at", "last_seen_at", "healthy_since", "acted_at", "reopened_at", "resolved_at", "struck_at")
"""The epoch seconds of an incident itself."""
GIVEN_UP = "given up after a restart of the agent: "
_SEVERITIES = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)


@dataclass(frozen=True, slots=True)
class IncidentRules:
    """The times and limits of a runbook; see ``runbooks.base.Runbook``. Seconds."""

    open_after_s: float = 0.0
    clear_after_s: float = 5.0
    verify_s: float = 60.0
    max_attempts: int = 2
    hold_s: float = 0.0
    max_relapses: int = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one action of an incident; ``number`` is its index in ``Incident.actions``.

    ``refused``: it has changed nothing. ``put_off``: only because nothing would have remembered it.
    """

    incident: str
    number: int
    ok: bool
    detail: str
    refused: bool = False
    put_off: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """The input of one tick, by incident id; an id missing in ``healed`` is not known to be healed.

    ``idle`` are open incidents whose runbook has nothing to do, ``held`` those whose cause is current. ``unprovable``
    has since when nobody can see any more whether an incident is over.
    """

    findings: Sequence[Finding] = ()
    healed: Mapping[str, bool | None] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    outcomes: Sequence[Outcome] = ()
    held: frozenset[str] = frozenset()
    unprovable: Mapping[str, float] = field(default_factory=dict)


def is_current(incident: Incident) -> bool:
    """True until the fault is over."""
    return incident.resolved_at is None


def started(incident: Incident, actions: Iterable[Mapping[str, object]], now: float) -> Incident:
    """The incident after ``actions`` (as recorded, outcome "running") were started."""
    after = told(incident, actions)
    return replace(after, state=State.ACTING, acted_at=now, attempts=incident.attempts + 1)


def told(incident: Incident, actions: Iterable[Mapping[str, object]]) -> Incident:
    """The incident after notifications (as recorded, outcome "running") were started apart from an attempt."""
    return replace(incident, actions=(*incident.actions, *actions))


def noted(incident: Incident, actions: Iterable[Mapping[str, object]]) -> Incident:
    """The incident with actions that were only recommended, or refused; each is recorded once."""
    known = {_same(action) for action in incident.actions}
    new = [action for action in actions if _same(action) not in known]
    room = MAX_ACTIONS - len(incident.actions)
    return replace(incident, actions=(*incident.actions, *new[:room])) if new and room > 0 else incident


def resumed(incident: Incident, now: float) -> Incident:
    """The incident as loaded after a restart of the agent. Actions under way stay so: see ``unfinished``.

    The time of health starts over, as the time without an agent is unknown. A time to come, of a clock that was ahead,
    is taken for ``now``, or the wait that it begins would last until then.
    """
    untold = incident.untold or ("opened" if any(a["verb"] in HARMLESS for _, a in unfinished(incident)) else "")
    incident = replace(_with_times(incident, lambda at: min(at, now)), healthy_since=None, untold=untold)
    if incident.state is State.ACTING and not [*unfinished(incident)]:
        return replace(incident, state=State.VERIFYING, acted_at=now)
    if incident.state is State.VERIFYING and incident.acted_at is None:
        return replace(incident, acted_at=now)
    return incident


def unfinished(incident: Incident) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Number and record of every action that is under way."""
    for number, action in enumerate(incident.actions):
        if action.get("outcome") == "running":
            yield number, action


def carried_out(incident: Incident) -> Sequence[Mapping[str, object]]:
    """The actions that were begun and change something: to notify people is none."""
    begun = ("running", "ok", "failed")
    return [a for a in incident.actions if a.get("verb") not in HARMLESS and a.get("outcome") in begun]


def failure(incident: Incident) -> Mapping[str, object] | None:
    """The action that has failed in the newest attempt at ending the incident, if there is one."""
    done = carried_out(incident)
    newest = [action for action in done if action.get("at") == done[-1].get("at")]
    return next((action for action in newest if action.get("outcome") == "failed"), None)


def resuming(incident: Incident, number: int) -> Incident:
    """The incident while an action that was cut off is carried out for the second time, which is recorded."""
    actions = [*incident.actions]
    actions[number] = {**actions[number], "resumed": True}
    return replace(incident, actions=tuple(actions))


def superseded(incident: Incident, by: str, now: float) -> Incident:
    """The incident, ended because the one with the id ``by`` is about the same."""
    actions = tuple(
        {**action, "outcome": "failed", "detail": GIVEN_UP + f"{by} is about the same", "ended_at": now}
        if action.get("outcome") == "running"
        else action
        for action in incident.actions
    )
    verdict = f"continued as {by}"
    return replace(incident, state=State.ESCALATED, resolved_at=now, actions=actions, verdict=verdict)


def shifted(incident: Incident, seconds: float) -> Incident:
    """The incident after a step of the wall clock by ``seconds``, evidence included, as times tell which came first."""

    def moved(at: float | None) -> float | None:
        return None if at is None else at + seconds

    ack, end = incident.ack, incident.closed
    return replace(
        _with_times(incident, lambda at: at + seconds),
        evidence=tuple(replace(e, at=e.at + seconds, last=moved(e.last)) for e in incident.evidence),
        ack=ack and replace(ack, at=ack.at + seconds, until=moved(ack.until), over_at=moved(ack.over_at)),
        closed=end and replace(end, at=end.at + seconds, gone_at=moved(end.gone_at)),
    )


def _with_times(incident: Incident, move: Callable[[float], float]) -> Incident:
    times: dict[str, Any] = {name: move(at) for name in TIMES if (at := getattr(incident, name)) is not None}
    return replace(incident, **times)


def _same(action: Mapping[str, object]) -> tuple[object, ...]:
    return action.get("verb"), action.get("target"), action.get("outcome"), action.get("detail")


def reopened(old: Incident, finding: Finding, rule: IncidentRules, now: float) -> Incident:
    """The incident ``old``, found again. One that was escalated stays escalated."""
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
    return merged(back, finding, now)


def opened(finding: Finding, now: float) -> Incident:
    """A new incident."""
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
        evidence=tuple({(e.text, e.source): e for e in finding.evidence}.values())[: 2 * MAX_EVIDENCE // 3],
        cost=finding.cost,
        job=finding.job,
        opened_at=now,
        last_seen_at=now,
        data=finding.data,
        run=finding.run,
        struck_at=finding.struck_at,
        gravity=finding.gravity,
    )


def rises(incident: Incident, finding: Finding) -> bool:
    """True if the finding is graver than all before: its severity is higher, or more has to be done about it."""
    severer = _SEVERITIES.index(finding.severity) > _SEVERITIES.index(incident.severity)
    return severer or 0 < incident.gravity < finding.gravity


def worsened(incident: Incident, verdict: str) -> Incident:
    """The incident from a rise on: it is answered as a new one would be, once the actions under way have ended."""
    if incident.state is State.ACTING:
        return replace(incident, worse=True)
    return replace(incident, state=State.OPEN, attempts=0, acted_at=None, verdict=verdict, worse=False)


def merged(incident: Incident, finding: Finding, now: float) -> Incident:
    """The incident with a further finding. A surer or graver one replaces the culprit; severity and cost never shrink.

    Rank, job and run are those at the time of the evidence: the same evidence, judged later, only adds to them.
    """
    graver = rises(incident, finding)
    surer = graver or finding.confidence >= incident.confidence
    same = finding.struck_at is not None and finding.struck_at == incident.struck_at
    first, second = (incident, finding) if same else (finding, incident)
    after = replace(
        incident,
        severity=max(incident.severity, finding.severity, key=_SEVERITIES.index),
        gravity=max(incident.gravity, finding.gravity),
        summary=finding.summary if surer else incident.summary,
        culprit=_completed(finding.culprit, incident.culprit, same=same) if surer else incident.culprit,
        confidence=finding.confidence if surer else incident.confidence,
        evidence=_evidence(incident, finding),
        cost=_cost(incident.cost, finding.cost, now - incident.last_seen_at),
        job=first.job or second.job,
        run=first.run or second.run,
        last_seen_at=now,
        struck_at=incident.struck_at if finding.struck_at is None else finding.struck_at,
        data={**incident.data, **finding.data},
    )
    return worsened(after, f"worse: {finding.summary}") if graver else after


def _completed(new: Culprit, old: Culprit, *, same: bool) -> Culprit:
    """The ``new`` culprit with the rank of the same GPU, or the GPU of the same rank, that only the ``old`` one has."""
    if new.gpu is None:
        return replace(new, gpu=old.gpu) if new.rank is not None and new.rank == old.rank else new
    if new.gpu != old.gpu or old.rank is None:
        return new
    return replace(new, rank=old.rank) if same or new.rank is None else new


def _cost(before: Cost, now: Cost, seconds: float) -> Cost:
    """The loss so far: that of the finding, or the sum of the lost share over time if that is more.

    A finding covers only its window, so that incidents of hours need the sum.
    """
    now = followed(before, now)
    added = now.throughput_ratio * now.gpus * min(max(seconds, 0.0), COST_GAP_S)
    return replace(now, gpu_seconds=max(now.gpu_seconds, before.gpu_seconds + added))


def _evidence(incident: Incident, finding: Finding) -> tuple[Evidence, ...]:
    """The evidence of the opening, then that of the present finding; numbers in between are in the metrics.

    A sentence of the opening that is read again stays one entry.
    """
    present = {(e.text, e.source): e for e in finding.evidence}
    opening = []
    for e in incident.evidence:
        if e.at <= incident.opened_at:
            again = present.pop((e.text, e.source), e)
            opening.append(replace(e, last=again.at) if again.at > e.newest else e)
    return (*opening, *[*present.values()][: MAX_EVIDENCE - len(opening)])


def settled(incident: Incident, outcomes: Sequence[Outcome], rule: IncidentRules, now: float) -> Incident:
    """The incident after outcomes of actions. After the last one the effect is verified, or a failure tried again.

    A postponed action is not an attempt.
    """
    if not outcomes:
        return incident
    actions = list(incident.actions)
    for outcome in outcomes:
        end = {"outcome": "ok" if outcome.ok else "failed", "detail": outcome.detail, "ended_at": now}
        actions[outcome.number] = {**actions[outcome.number], **end}
    after = replace(incident, actions=tuple(actions))
    if incident.state is not State.ACTING or any(action.get("outcome") == "running" for action in actions):
        return after
    if incident.worse:
        return worsened(replace(after, state=State.OPEN), f"worse: {incident.summary}")
    failures = [outcome.detail for outcome in outcomes if not outcome.ok]
    if failures and all(outcome.put_off for outcome in outcomes if not outcome.ok):
        return replace(after, state=State.OPEN, attempts=incident.attempts - 1, verdict=f"put off: {failures[0]}")
    if failures and incident.attempts < rule.max_attempts:
        return replace(after, state=State.OPEN, verdict=f"attempt {incident.attempts} failed: {failures[0]}")
    verdict = f"failed: {failures[0]}" if failures else "acted, waiting for the effect"
    return replace(after, state=State.VERIFYING, acted_at=now, verdict=verdict)


def judged(
    incident: Incident, observed: Observed, found: bool, rule: IncidentRules, watching_since: float, now: float
) -> Incident:
    """The incident after this tick: ended, given up, tried again or escalated if its time has come."""
    answer = observed.healed.get(incident.id)
    healed = answer is True
    since = (incident.healthy_since if incident.healthy_since is not None else now) if healed else None
    incident = replace(incident, healthy_since=since) if since != incident.healthy_since else incident
    if incident.id in observed.held:
        return incident
    if since is not None and now - since >= rule.clear_after_s and not found and incident.state is not State.ACTING:
        return _end(incident, now)
    if not healed and not found and incident.state is not State.ACTING and incident.id in observed.unprovable:
        return incident if now - observed.unprovable[incident.id] < UNPROVEN_S else _unproven(incident, now)
    unseen_since = max(incident.last_seen_at, watching_since)
    if answer is None and incident.state is not State.ACTING and now - unseen_since >= GIVE_UP_S:
        verdict = f"given up: nothing is known of it for {GIVE_UP_S / 60:.0f} minutes"
        return replace(incident, state=State.ESCALATED, resolved_at=now, verdict=verdict)
    if incident.state is State.VERIFYING and not healed:
        return _after_attempt(incident, rule, watching_since, now)
    begun = [at for at in (incident.acted_at, incident.reopened_at) if at is not None]
    idle_since = max(watching_since, max(begun, default=incident.opened_at))
    idle = incident.state is State.OPEN and incident.id in observed.idle and not healed
    if idle and now - idle_since >= rule.verify_s:
        return replace(incident, state=State.ESCALATED, verdict=f"not over after {rule.verify_s:.0f} s")
    return incident


def _after_attempt(incident: Incident, rule: IncidentRules, watching_since: float, now: float) -> Incident:
    assert incident.acted_at is not None
    if now - max(incident.acted_at, watching_since) < rule.verify_s:
        return incident
    tries = "attempt" if incident.attempts == 1 else "attempts"
    verdict = f"not over {rule.verify_s:.0f} s after {incident.attempts} {tries}"
    state = State.OPEN if incident.attempts < rule.max_attempts else State.ESCALATED
    return replace(incident, state=state, verdict=verdict)


def _unproven(incident: Incident, now: float) -> Incident:
    ended = f"run {incident.run} has ended on this node" if incident.run else "its GPU is idle"
    verdict = f"unproven: {ended}, so nobody can see whether it is over"
    state = State.ESCALATED if incident.state is State.ESCALATED else State.UNPROVEN
    return replace(incident, state=state, resolved_at=now, verdict=verdict)


def _end(incident: Incident, now: float) -> Incident:
    if incident.state is State.ESCALATED:
        return replace(incident, resolved_at=now, verdict=f"{incident.verdict}; over later")
    verdict = "over by itself" if incident.attempts == 0 else f"over after attempt {incident.attempts}"
    return replace(incident, state=State.RESOLVED, resolved_at=now, verdict=verdict)


SOCKET: Final = "control.sock"
"""Where in the state folder an agent takes orders, see ``opsd.agent.daemon``."""
PATIENCE_S: Final = 10.0
"""How long a person waits for the tick that carries out the order."""
WRITE_S: Final = 3.0
"""And for the disk then."""
ACKNOWLEDGED: Final = "acknowledged"
"""The state that metrics show for an incident with an acknowledgement in force."""


@dataclass(slots=True)
class Order:
    """What a person asks for: ``ack`` for ``for_s`` (None: to the end) or ``close``, of one incident.

    Who carries it out sets ``done``, and ``error`` if it cannot be done.
    """

    verb: Literal["ack", "close"]
    incident: str
    by: str
    for_s: float | None = None
    reason: str = ""
    done: str = ""
    error: str = ""


class ByHandError(Exception):
    """A person asks for something that cannot be done; the message is one sentence."""


def holder(incident: Incident) -> Acknowledgement | None:
    """The acknowledgement in force."""
    ack = incident.ack
    return ack if ack is not None and ack.over_at is None else None


def acknowledged(incident: Incident, by: str, for_s: float | None, now: float) -> Incident:
    """The incident that the person ``by`` has for ``for_s``, None: to its end. Replaces an earlier acknowledgement.

    Raises ByHandError if the incident is over.
    """
    if incident.resolved_at is not None:
        raise ByHandError(f"{incident.id} is over since {clock(incident.resolved_at)}: there is nothing to acknowledge")
    until = None if for_s is None else now + for_s
    return replace(incident, ack=Acknowledgement(by, now, until), untold="")


def lapsed(incident: Incident, now: float, *, worse: bool) -> tuple[Incident, str]:
    """The incident without an acknowledgement that is over now, and why; it and "" while there is none to end.

    It is over after its time, and once the incident is ``worse`` than what was acknowledged.
    """
    ack = holder(incident)
    if ack is None or not (worse or (ack.until is not None and now >= ack.until)):
        return incident, ""
    why = "worse"
    if ack.until is not None and not worse:
        why = f"the acknowledgement by {ack.by} was for {duration(ack.until - ack.at)}"
    return replace(incident, ack=replace(ack, over_at=now)), why


def closed(incident: Incident, by: str, reason: str, now: float) -> Incident:
    """The incident, ended by a person. Raises ByHandError if it is over, or while opsd acts on it."""
    if incident.resolved_at is not None:
        raise ByHandError(f"{incident.id} is over since {clock(incident.resolved_at)}: there is nothing to close")
    if incident.state is State.ACTING:
        raise ByHandError(f"opsd is acting on {incident.id}: close it once the action has ended")
    return replace(
        incident,
        state=State.RESOLVED,
        resolved_at=now,
        healthy_since=None,
        verdict=f"closed by {by}: {reason}",
        closed=Closing(by, now, reason),
    )


def is_new(old: Incident, finding: Finding) -> bool:
    """Whether ``finding`` is evidence that ``old`` was not closed on: a later event, or a graver finding."""
    before = old.struck_at if old.struck_at is not None or old.closed is None else old.closed.at
    later = finding.struck_at is not None and before is not None and finding.struck_at > before
    return later or rises(old, finding)


def still_closed(
    old: Incident, finding: Finding | None, healed: bool | None, clear_after_s: float, lost: bool, now: float
) -> Incident | None:
    """The closed incident ``old`` after this tick; None once its evidence is gone or new evidence is there.

    Evidence is gone once the fault was known to be healed for ``clear_after_s``, or if there was none for so long that
    it is ``lost``.
    """
    if finding is not None:
        return None if is_new(old, finding) else replace(old, last_seen_at=now, healthy_since=None)
    since = (old.healthy_since if old.healthy_since is not None else now) if healed else None
    proven = since is not None and now - since >= clear_after_s
    return None if proven or lost else replace(old, healthy_since=since)


def gone(old: Incident, now: float) -> Incident:
    """The closed incident, once its evidence is gone."""
    return old if old.closed is None else replace(old, closed=replace(old.closed, gone_at=now))


def goes_on(ended: Collection[Incident]) -> Mapping[tuple[str, str], Incident]:
    """The closed ones of the ``ended`` incidents (newest first) whose evidence goes on, as far as is known."""
    found = [i for i in ended if i.closed is not None and i.closed.gone_at is None]
    return {(i.kind, i.key): i for i in reversed(found)}


def who_has_it(incident: Incident) -> str:
    """Who has the incident in words, "" if nobody ever had it."""
    if (ack := incident.ack) is None:
        return ""
    if ack.over_at is not None:
        return f"nobody; {ack.by} had it from {clock(ack.at)} to {clock(ack.over_at)}"
    until = "" if ack.until is None or incident.resolved_at is not None else f", until {clock(ack.until)}"
    return f"{ack.by} since {clock(ack.at)}{until}"
