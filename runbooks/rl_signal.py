"""A reinforcement learning run has no signal to learn from, or a wrong one: it runs on, and reports success."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opsd.collectors.base import Event, RankFact
from opsd.runbooks.base import Culprit, Finding, Incident, View
from opsd.runbooks.lib.remedies import RunRunbook
from opsd.runbooks.lib.runs import gpu_hours, live_leaders, run_events, run_finding, run_over
from opsd.runbooks.lib.signals import integer, number, text

HISTORY_S = 7 * 86_400.0
NEWEST = 64


@dataclass(frozen=True, slots=True)
class _Sign:
    """A sign of a broken signal: the ``field`` of an event is at least ``least`` in ``row`` events, one after another.

    ``said`` has a place for the newest value.
    """

    name: str
    field: str
    least: float
    row: int
    said: str
    culprit: str
    detail: str


SIGNS = (
    _Sign("unscored", "unscored", 1.0, 5, "a verifier gives no reward at all ({:.0f} of them)", "user code",
          "a verifier that raises, or returns None"),
    _Sign("constant", "flat", 0.99, 10, "{:.0%} of the groups have rewards without any spread", "user code",
          "the reward is the same for all answers: the verifier, the prompts, or a task that is solved"),
    _Sign("mismatch", "mismatch", 0.5, 5, "sampled and trained log-probabilities differ by {:.2g} nats a token",
          "user code", "the weights or the precision of the server are not those of the trainer"),
    _Sign("cut", "cut", 0.95, 10, "{:.0%} of the answers are cut off at their limit", "user code",
          "max_completion_length, or a model that never stops"),
    _Sign("far", "kl", 5.0, 5, "the model is {:.2g} nats a token from its reference", "user code",
          "the learning rate, or a reward that is exploited"),
    _Sign("clipped", "clipped", 0.5, 5, "{:.0%} of the tokens are clipped", "user code",
          "the learning rate, or rollouts that are too old"),
)  # fmt: skip
"""The gravest first. The limits are chosen, not measured."""


def _rollouts(view: View, run: str) -> list[Event]:
    """The newest events, one for each step."""
    by_step = {integer(event.data, "step"): event for event in run_events(view, "rollouts", run, HISTORY_S)}
    return [by_step[step] for step in sorted(by_step)][-NEWEST:]


def _shows(sign: _Sign, events: Sequence[Event]) -> bool:
    last = [number(event.data, sign.field) for event in events[-sign.row :]]
    return len(last) == sign.row and all(value is not None and value >= sign.least for value in last)


def _detect(view: View) -> Iterator[Finding]:
    for leader in live_leaders(view):
        events = _rollouts(view, leader.run)
        if signs := [sign for sign in SIGNS if _shows(sign, events)]:
            yield _finding(view, leader, events, signs)


def _finding(view: View, leader: RankFact, events: Sequence[Event], signs: Sequence[_Sign]) -> Finding:
    worst, newest = signs[0], events[-1].data
    facts = [sign.said.format(number(newest, sign.field) or 0.0) for sign in signs]
    since = _since(worst, events)
    hours = gpu_hours(leader, since)
    reward = number(newest, "reward")
    return run_finding(
        view, leader, *facts, f"since step {since}, the reward is {reward}",
        source="events of the run",
        summary=f"{leader.run}: {facts[0]}",
        culprit=Culprit(worst.culprit, detail=worst.detail),
        confidence=0.8 if worst.name in ("unscored", "constant") else 0.6,
        cost=f"{hours:.1f} GPU-hours without a signal",
        sign=worst.name,
        step=integer(newest, "step"),
    )  # fmt: skip


def _since(sign: _Sign, events: Sequence[Event]) -> int:
    """The first step of the newest row of events that show the sign."""
    step = integer(events[-1].data, "step")
    for event in reversed(events):
        value = number(event.data, sign.field)
        if value is None or value < sign.least:
            break
        step = integer(event.data, "step")
    return step


def _healed(incident: Incident, view: View) -> bool | None:
    """True once ten later events do not show the sign, or the run has ended as planned."""
    run = text(incident.data, "run")
    sign = next((each for each in SIGNS if each.name == text(incident.data, "sign")), None)
    later = [e for e in _rollouts(view, run) if integer(e.data, "step") > integer(incident.data, "step")]
    if sign is not None and len(later) >= sign.row:
        values = [number(event.data, sign.field) for event in later[-sign.row :]]
        if all(value is not None and value < sign.least for value in values):
            return True
    return run_over(incident, view)


RUNBOOK = RunRunbook(first=("opsd report RUN",), detect=_detect, healed=_healed, verify_s=3600.0)
