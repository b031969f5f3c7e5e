"""Learning rate as a function of the absolute step."""

from __future__ import annotations

import math

from opsd.trainer.settings import ScheduleSettings


def rate_factor(step: int, schedule: ScheduleSettings) -> float:
    """Factor of the peak learning rate at ``step``, counted from 1.

    All phases are in absolute steps and independent of the run's length, so that a run is extended by moving its decay.
    wsd is warm-up, stable, decay (arXiv 2404.06395), cosine that of SGDR without restarts (arXiv 1608.03983).
    """
    if step < schedule.warmup:
        return step / schedule.warmup
    if schedule.kind == "multi-step":
        return schedule.gamma ** sum(step >= milestone for milestone in schedule.milestones)
    start = schedule.decay_start if schedule.kind == "wsd" else schedule.warmup
    left = min(1.0, max(0.0, (schedule.decay_end - step) / (schedule.decay_end - start)))
    if schedule.kind == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return schedule.floor + (1 - schedule.floor) * left
