"""Whether opsd may execute the actions of a runbook: a pure function of mode, history and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from opsd.runbooks.base import Action, Incident
from opsd.settings.policy import PolicySettings, active_silence

HOUR_S = 3600.0
HARMLESS = frozenset({"notify"})
"""Verbs that change nothing on the node: no cool-down, no rate limit, and also executed in mode recommend."""
OF_A_RUN = frozenset({"kill_process", "restart_generation"})
"""Verbs that touch the processes of a run's user; all others that change something are about hardware."""
DRAIN_OFF = "draining is switched off (policy.drain)"
UNCONFIRMED = "neither kernel nor driver gives a reason for it now"


class Ruling(StrEnum):
    """The decision about a proposed action."""

    RUN = "run"
    RECOMMEND = "recommended"
    REFUSE = "refused"


@dataclass(frozen=True, slots=True)
class PastAction:
    """An action executed at the epoch second ``at`` for an incident of ``kind``.

    ``user`` is whose processes it was about, None for hardware. One that was ``refused`` has changed nothing.
    """

    kind: str
    verb: str
    target: str
    at: float
    user: int | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one action, with the reason if it is not "run"."""

    action: Action
    verdict: Ruling
    reason: str = ""


def decide(
    incident: Incident,
    actions: Sequence[Action],
    mode: str,
    history: Sequence[PastAction],
    policy: PolicySettings,
    started_at: float,
    now: float,
    user_of: Callable[[Action], int | None] = lambda _action: None,
    confirmed: Sequence[Action] = (),
    unrecorded: str = "",
) -> tuple[Decision, ...]:
    """Decide about ``actions``, which form one attempt. Times are epoch seconds, ``started_at`` that of the agent.

    ``confirmed`` are the actions that the kernel and the drivers alone give reason for now. ``unrecorded`` says why the
    journal cannot take an intention, "" if it can; without it nothing is changed.

    In mode observe there are no decisions. An attempt is all or nothing: if one of its actions is refused, all are, so
    that no remedy is executed halfway. Notifications stand apart: neither do they refuse the others, nor the reverse.
    ``user_of`` tells whose processes an action is about. Each user has a budget for each kind of incident, and so has
    the hardware, so that nobody can use up another's. Where drains are switched off they are recommended, and refuse
    nothing else.
    """
    if mode == "observe":
        return ()
    muted = policy.muted(incident.kind, now)
    silent = [action for action in actions if muted and action.verb in HARMLESS]
    off = [action for action in actions if action.verb == "drain_node" and not policy.drain]
    actions = [action for action in actions if action not in (*silent, *off)]
    checks: tuple[Callable[[Action], str], ...] = (
        lambda action: _unrecorded(action, mode, unrecorded),
        lambda _action: _stale(incident, started_at),
        lambda _action: muted if active_silence(policy.maintenance, incident.kind, now) else "",
        lambda action: _unconfirmed(action, confirmed),
        lambda action: _cooling(incident.kind, action, history, policy, now),
        lambda action: _too_many(incident.kind, action, actions, history, policy, now, user_of),
    )
    decisions = []
    for action in actions:
        reason = next(filter(None, (check(action) for check in checks)), "")
        if reason:
            decisions.append(Decision(action, Ruling.REFUSE, reason))
        elif mode == "act" or action.verb in HARMLESS:
            decisions.append(Decision(action, Ruling.RUN))
        else:
            decisions.append(Decision(action, Ruling.RECOMMEND, "policy mode is recommend"))
    changing = (decision for decision in decisions if decision.action.verb not in HARMLESS)
    if refused := next((decision for decision in changing if decision.verdict is Ruling.REFUSE), None):
        together = f"part of an attempt that is refused: {refused.reason}"
        decisions = [
            d
            if d.verdict is Ruling.REFUSE or d.action.verb in HARMLESS
            else Decision(d.action, Ruling.REFUSE, together)
            for d in decisions
        ]
    apart = [(silent, Ruling.REFUSE, muted), (off, Ruling.RECOMMEND, DRAIN_OFF)]
    return (*decisions, *(Decision(action, ruling, why) for group, ruling, why in apart for action in group))


def _unrecorded(action: Action, mode: str, problem: str) -> str:
    changes = mode == "act" and action.verb not in HARMLESS
    return f"nothing would remember it: {problem}" if problem and changes else ""


def _stale(incident: Incident, started_at: float) -> str:
    newest = max((evidence.newest for evidence in incident.evidence), default=incident.opened_at)
    return "its evidence is older than this agent's start" if newest < started_at else ""


def needs_witness(action: Action) -> bool:
    """True if it changes hardware or takes the node out, for which the word of kernel or driver is needed."""
    return action.verb not in HARMLESS | OF_A_RUN


def _unconfirmed(action: Action, confirmed: Sequence[Action]) -> str:
    same = ((one.verb, one.target, one.args) for one in confirmed)
    if not needs_witness(action) or (action.verb, action.target, action.args) in same:
        return ""
    return UNCONFIRMED


def _cooling(kind: str, action: Action, history: Sequence[PastAction], policy: PolicySettings, now: float) -> str:
    if action.verb in HARMLESS:
        return ""
    cooldown_s = policy.cooldown_of(kind)
    recent = any(
        past.kind == kind and past.target == action.target and past.verb not in HARMLESS and now - past.at < cooldown_s
        for past in history
    )
    return f"acted on {action.target} for {kind} less than {cooldown_s:g} s ago" if recent else ""


def _too_many(
    kind: str,
    action: Action,
    actions: Sequence[Action],
    history: Sequence[PastAction],
    policy: PolicySettings,
    now: float,
    user_of: Callable[[Action], int | None],
) -> str:
    if action.verb in HARMLESS:
        return ""
    user, limit = user_of(action), policy.max_actions_per_hour
    wanted = _number((a.verb, a.target, now) for a in actions if a.verb not in HARMLESS and user_of(a) == user)
    recent = _number(
        (past.verb, past.target, past.at)
        for past in history
        if past.kind == kind and past.user == user
        and now - past.at < HOUR_S and past.verb not in HARMLESS and not past.refused
    )  # fmt: skip
    whose = "" if user is None else f" for the processes of user {user}"
    return f"the limit of {limit} actions an hour is reached{whose}" if recent + wanted > limit else ""


def _number(actions: Iterable[tuple[str, str, float]]) -> int:
    """How many actions these are, as verb, target and time; to swap a node out of all its runs is one."""
    counted = Counter(actions)
    return sum(1 if verb == "swap_node" else number for (verb, _, _), number in counted.items())
