"""Whether opsd may execute the actions of a runbook: a pure function of mode, history and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from opsd.runbooks.base import Action, Incident
from opsd.settings.policy import Override, PolicySettings
from opsd.settings.silences import Silence, active_silence

HOUR_S = 3600.0
HARMLESS = frozenset({"notify"})
"""Verbs that change nothing on the node: no cool-down, no rate limit, and also executed in mode recommend."""


class Verdict(StrEnum):
    """The decision about a proposed action."""

    RUN = "run"
    RECOMMEND = "recommended"
    REFUSE = "refused"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of actions. ``cooldowns`` has the kinds of incident whose cool-down differs from ``cooldown_s``."""

    cooldown_s: float = 60.0
    max_actions_per_hour: int = 12
    cooldowns: Mapping[str, float] = field(default_factory=dict)
    maintenance: tuple[Silence, ...] = ()
    mute: tuple[Silence, ...] = ()

    @classmethod
    def of(cls, policy: PolicySettings) -> Limits:
        """The limits that the settings ask for."""
        cooldowns = {
            kind: override.cooldown_s
            for kind, override in policy.runbooks.items()
            if isinstance(override, Override) and override.cooldown_s is not None
        }
        maintenance, mute = (tuple(time.silence() for time in times) for times in (policy.maintenance, policy.mute))
        return cls(policy.cooldown_s, policy.max_actions_per_hour, cooldowns, maintenance, mute)

    def muted(self, kind: str, wall: float) -> str:
        """Why notifications about ``kind`` are silenced at the epoch second ``wall``, "" if they are not."""
        for name, spans in (("maintenance", self.maintenance), ("muted", self.mute)):
            if span := active_silence(spans, kind, wall):
                return f"{name}: {span.reason}" if span.reason else name
        return ""


@dataclass(frozen=True, slots=True)
class PastAction:
    """An action executed at the epoch second ``at`` for an incident of ``kind``."""

    kind: str
    verb: str
    target: str
    at: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one action, with the reason if it is not "run"."""

    action: Action
    verdict: Verdict
    reason: str = ""


def decide(
    incident: Incident,
    actions: Sequence[Action],
    mode: str,
    history: Sequence[PastAction],
    limits: Limits,
    started_at: float,
    now: float,
) -> tuple[Decision, ...]:
    """Decide about ``actions``, which form one attempt. Times are epoch seconds, ``started_at`` that of the agent.

    In mode observe there are no decisions. An attempt is all or nothing: if one of its actions is refused, all are, so
    that no remedy is executed halfway. A muted notification does not refuse the others.
    """
    if mode == "observe":
        return ()
    muted = limits.muted(incident.kind, now)
    silent = [action for action in actions if muted and action.verb in HARMLESS]
    actions = [action for action in actions if action not in silent]
    checks: tuple[Callable[[Action], str], ...] = (
        lambda _action: _stale(incident, started_at),
        lambda _action: muted if active_silence(limits.maintenance, incident.kind, now) else "",
        lambda action: _cooling(incident.kind, action, history, limits, now),
        lambda _action: _too_many(actions, history, limits, now),
    )
    decisions = []
    for action in actions:
        reason = next(filter(None, (check(action) for check in checks)), "")
        if reason:
            decisions.append(Decision(action, Verdict.REFUSE, reason))
        elif mode == "act" or action.verb in HARMLESS:
            decisions.append(Decision(action, Verdict.RUN))
        else:
            decisions.append(Decision(action, Verdict.RECOMMEND, "policy mode is recommend"))
    if refused := next((decision for decision in decisions if decision.verdict is Verdict.REFUSE), None):
        together = f"part of an attempt that is refused: {refused.reason}"
        decisions = [
            d if d.verdict is Verdict.REFUSE else Decision(d.action, Verdict.REFUSE, together) for d in decisions
        ]
    return (*decisions, *(Decision(action, Verdict.REFUSE, muted) for action in silent))


def _stale(incident: Incident, started_at: float) -> str:
    newest = max((evidence.at for evidence in incident.evidence), default=incident.opened_at)
    return "its evidence is older than this agent's start" if newest < started_at else ""


def _cooling(kind: str, action: Action, history: Sequence[PastAction], limits: Limits, now: float) -> str:
    if action.verb in HARMLESS:
        return ""
    cooldown_s = limits.cooldowns.get(kind, limits.cooldown_s)
    recent = any(p.kind == kind and p.target == action.target and now - p.at < cooldown_s for p in history)
    return f"acted on {action.target} for {kind} less than {cooldown_s:g} s ago" if recent else ""


def _too_many(actions: Sequence[Action], history: Sequence[PastAction], limits: Limits, now: float) -> str:
    wanted = sum(action.verb not in HARMLESS for action in actions)
    recent = sum(now - past.at < HOUR_S and past.verb not in HARMLESS for past in history)
    limit = limits.max_actions_per_hour
    return f"the limit of {limit} actions an hour is reached" if wanted and recent + wanted > limit else ""
