"""The loss of a run fell and has stopped falling, although by its own course it should go on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Culprit, Finding, Incident, Severity, View
from opsd.runbooks.lib.remedies import RunRunbook
from opsd.runbooks.lib.runs import healed_by, live_leaders, run_finding
from opsd.runbooks.lib.signals import SURE, WINDOW_S, by_step, condensed, counted, due, number, thirds, trend
from opsd.runbooks.loss_rising import fell_below_limit

LOSS, NORM = "opsd_rank_loss", "opsd_rank_grad_norm"
LOOK_EVERY_S = 10.0
BLOCKS, LEAST_POINTS = 24, 180
SETTLED_STEPS = 100

LEAST_FALL = 0.01
"""The loss must have fallen by this share of itself in the first half of the window to have a course at all."""

FLAT = 0.15
"""A plateau has at most this share of the change that was to be expected. Measured over the logarithm of the step: the
loss is close to a power law of the training done (Kaplan et al. 2020, Hoffmann et al. 2022), so that a healthy course
keeps most of its slope there while it flattens over the steps."""

FALLS_AGAIN = 0.25
"""Share of the missing fall by which the loss has to be below the plateau for it to be over."""

FROZEN_STEPS, CHANGING = 30, 0.9
"""Losses that are equal to the bit. Before, nine of ten differed from the one before them: the loss is reported again
with each step."""

VANISHED = 0.1
"""A gradient norm this far below the earlier one means that nothing is learnt, whatever the data."""


@dataclass(frozen=True, slots=True)
class _Plateau:
    """The level of the plateau, the fall that was expected and the one that came, over ``steps`` steps."""

    level: float
    expected: float
    came: float
    steps: int
    vanished: bool


def _plateau(view: View, leader: RankFact) -> _Plateau | None:
    """The plateau that the loss is on, None if it falls, never fell, or scatters too much to tell."""
    points = by_step(view, LOSS, leader.run, leader.rank)
    if len(points) < LEAST_POINTS or leader.steps_reported < SETTLED_STEPS:
        return None
    course = [(math.log(step + 1), loss) for step, loss in condensed(points, BLOCKS)]
    half = len(course) // 2
    early, late = trend(course[:half]), trend(course[-half:])
    expected, came = -early.slope * (course[-1][0] - course[-half][0]), -late.rise
    level = median(loss for _, loss in course[-half:])
    fell = early.sure and -early.rise >= LEAST_FALL * abs(level)
    if not fell or expected <= SURE * max(early.noise, late.noise) or abs(came) > FLAT * expected:
        return None
    return _Plateau(level, expected, came, len(points) // 2, _vanished(view, leader))


def _vanished(view: View, leader: RankFact) -> bool:
    norms = [norm for _, norm in by_step(view, NORM, leader.run, leader.rank)]
    if len(norms) < LEAST_POINTS:
        return False
    before, _, now = thirds(norms)
    return now < VANISHED * before


def _detect(view: View) -> Iterator[Finding]:
    series = view.select(LOSS)
    if not series:
        return
    looks = due(series[0], LOOK_EVERY_S)
    for leader in live_leaders(view):
        if _frozen(view, leader):
            yield _frozen_finding(view, leader)
        elif looks and (plateau := _plateau(view, leader)) is not None:
            yield _finding(view, leader, plateau)


def _frozen(view: View, leader: RankFact) -> bool:
    """True if the last losses are equal to the bit, and are those of their steps.

    Some trainers repeat the last loss that they have logged. So a loss other than 0 counts only if the gradient norm or
    the learning rate changed meanwhile, or if before it the loss had changed with nearly every step.
    """
    steps = leader.steps[-FROZEN_STEPS:]
    if len(steps) < FROZEN_STEPS or not math.isfinite(steps[-1].loss):
        return False
    value = steps[-1].loss
    if steps[0].loss != value or any(step.loss != value for step in steps):
        return False
    beside = {(step.grad_norm, step.learning_rate) for step in steps if math.isfinite(step.grad_norm)}
    return value == 0.0 or len(beside) > FROZEN_STEPS // 2 or _changed_each_step(view, leader, value)


def _changed_each_step(view: View, leader: RankFact, value: float) -> bool:
    """True if the loss was another one with nearly every sample before it became ``value`` for good."""
    for series in view.select(LOSS, run=leader.run, rank=str(leader.rank)):
        losses = [loss for _, loss in series.values(WINDOW_S)]
        while losses and losses[-1] == value:
            losses.pop()
        before = losses[-FROZEN_STEPS:]
        changes = sum(earlier != later for earlier, later in pairwise(before))
        return len(before) == FROZEN_STEPS and changes >= CHANGING * (FROZEN_STEPS - 1)
    return False


def _frozen_finding(view: View, leader: RankFact) -> Finding:
    value, since = leader.steps[-1].loss, leader.steps[-FROZEN_STEPS].step
    what = "exactly 0" if value == 0.0 else f"exactly {value!r}"
    fact = f"the loss has been {what} in each of the last {FROZEN_STEPS} steps, from step {since} on at the latest"
    return run_finding(
        view, leader, fact,
        severity=Severity.CRITICAL,
        summary=f"the loss of {leader.run} is frozen at {what}",
        culprit=Culprit("user code", detail="parameters that do not change, or a loss of nothing"),
        confidence=0.9,
        cost=f"every step since step {since} has taught the model nothing",
        frozen=value,
    )  # fmt: skip


def _healed(incident: Incident, view: View) -> bool | None:
    """True once a frozen loss changes, or the loss has fallen again; see ``fell_below_limit``."""
    return fell_below_limit(incident, view) if number(incident.data, "frozen") is None else _thawed(incident, view)


@healed_by
def _thawed(incident: Incident, _view: View, leader: RankFact) -> bool:
    return leader.live and any(step.loss != number(incident.data, "frozen") for step in leader.steps[-3:])


def _finding(view: View, leader: RankFact, plateau: _Plateau) -> Finding:
    detail = "the gradient has vanished" if plateau.vanished else "the schedule, or the data"
    return run_finding(
        view, leader,
        f"in the last {plateau.steps} steps the loss fell by {plateau.came:.3g}; by its course before, "
        f"{plateau.expected:.3g} were to be expected",
        "the gradient norm has fallen below a tenth of what it was" if plateau.vanished else "",
        summary=f"the loss of {leader.run} has stopped falling at {plateau.level:.3g}",
        culprit=Culprit("user code", detail=detail),
        confidence=0.7 if plateau.vanished else 0.4,
        cost=f"{counted(plateau.steps, 'step')} so far that have taught the model next to nothing",
        limit=plateau.level - FALLS_AGAIN * plateau.expected,
    )  # fmt: skip


RUNBOOK = RunRunbook(
    first=("opsd report RUN_FOLDER --text",), detect=_detect, healed=_healed, clear_after_s=30.0, verify_s=3600.0
)
