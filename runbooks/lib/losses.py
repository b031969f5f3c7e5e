"""What a slow run loses: one figure for each quantity, whoever asks. Pure.

The loss is measured where the run's own tokens per second of before the fault are known. Otherwise it is what the
runbook derives from clocks or step times, and called estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from opsd.collectors.base import RankFact, StepFact
from opsd.runbooks.base import Cost, Series, View
from opsd.runbooks.lib.signals import counted, level

TOKENS, FLOPS = "opsd_rank_tokens_per_second", "opsd_rank_flops_per_token"
PAST_S, BUT_LAST_S = 600.0, 60.0
LEAST_SAMPLES = 90
"""Seconds of steady training before a run has a level that it can fall from."""
RECENT_S, LEAST_STEPS = 30.0, 5
SETTLED_STEPS = 30
PAUSES = ("checkpoint", "evaluation", "setup")
"""Time in these phases is not training; it is taken out of the steps that have it."""
NOTHING = 0.01
"""A smaller share is reported as less than this."""
BELIEVED = 0.5
"""A past of which nobody knows that it was free of the fault is a measure if it shows this share of the estimate."""


def training_seconds(step: StepFact) -> float:
    """The duration of a step in seconds without its pauses."""
    return step.without(PAUSES)


def recent_steps(rank: RankFact, now: float) -> Sequence[StepFact]:
    """The rank's steps of the last seconds, the last few if these are more."""
    recent = [step for step in rank.steps if now - step.end <= RECENT_S]
    return recent if len(recent) >= LEAST_STEPS else rank.steps[-LEAST_STEPS:]


def rate(step: StepFact) -> float:
    """Tokens per second of training."""
    training = training_seconds(step)
    return step.tokens / training if training > 0 else 0.0


def past_rate(view: View, rank: RankFact, but_last_s: float = BUT_LAST_S) -> float | None:
    """Tokens per second that were usual for this rank until ``but_last_s`` ago, None without a past to compare with.

    Tokens that cost more than before, as those of longer sequences do, are no past.
    """
    labels = {"run": rank.run, "rank": str(rank.rank)}
    costs = view.select(FLOPS, **labels)
    if costs and len({cost for _, cost in costs[0].values(PAST_S)}) > 1:
        return None
    series = view.select(TOKENS, **labels)
    past = level(series[0], PAST_S, but_last_s) if series else None
    if past is None or past[2] < LEAST_SAMPLES or rank.steps_reported < SETTLED_STEPS:
        return None
    return past[0] if past[0] > 0 else None


def lost(
    view: View, rank: RankFact, estimate: float, *, lasting_s: float | None = None, counted_s: float = 0.0
) -> Cost:
    """The loss of the run of ``rank`` if it is slowed down by the share ``estimate``, and has been for ``counted_s``.

    ``lasting_s`` is how long the fault has lasted at least; None if that is not known.
    """
    world = rank.world_size
    whose = f"job {rank.job}" if rank.job else f"run {rank.run}"
    now = _rate_now(rank, view.now, lasting_s)
    before = None if now is None else past_rate(view, rank, max(BUT_LAST_S, lasting_s or 0.0))
    if lasting_s is None and now is not None and before is not None and 1 - now / before < BELIEVED * estimate:
        before = None
    return settled(Cost(estimate, estimate * world * counted_s, gpus=world, whose=whose, before=before, now=now))


def _rate_now(rank: RankFact, now: float, lasting_s: float | None) -> float | None:
    """Tokens per second of the recent steps, of those since the fault began; None while these are too few."""
    if lasting_s is None:
        steps = recent_steps(rank, now)
    else:
        slowed = [step for step in rank.steps if step.end - step.duration_s >= now - lasting_s]
        recent = [step for step in slowed if now - step.end <= RECENT_S]
        steps = recent if len(recent) >= LEAST_STEPS else slowed[-LEAST_STEPS:]
    return median(map(rate, steps)) or None if len(steps) >= LEAST_STEPS else None


def lost_by(whose: str, estimate: float, gpus: int, counted_s: float = 0.0) -> Cost:
    """The same where no run is known to measure."""
    return settled(Cost(estimate, estimate * gpus * counted_s, gpus=gpus, whose=whose))


def settled(cost: Cost) -> Cost:
    """``cost`` with the share that is measured if it is, and with the words for it."""
    if not cost.whose:
        return cost
    share, how, seconds = cost.throughput_ratio, "estimated", cost.gpu_seconds
    if cost.before and cost.now is not None:
        measured = max(0.0, 1 - cost.now / cost.before)
        seconds *= measured / share if share > 0 else 1.0
        share, how = measured, "measured"
    known = f"less than {NOTHING:.0%}" if share < NOTHING else f"{share:.0%}"
    text = f"{cost.whose} loses {known} ({counted(cost.gpus, 'GPU')}, {how})"
    return replace(cost, throughput_ratio=share, gpu_seconds=seconds, text=text)


def followed(before: Cost, now: Cost) -> Cost:
    """The newest cost of a fault, measured by what was usual when it began: the past of later has the fault as well."""
    if not now.whose or now.whose != before.whose or before.before is None or now.now is None:
        return now
    return settled(replace(now, before=before.before))


def since_first_growth(series: Series, now: float) -> float:
    """Seconds since a counter first grew in the last ``PAST_S``; 0.0 if it has not."""
    points = series.values(PAST_S)
    return next((now - at for at, value in points if value > points[0][1]), 0.0)
