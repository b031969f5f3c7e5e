"""Learning rate as a function of the absolute step."""

from __future__ import annotations

from trainer.config import ScheduleSettings


def warmup_stable_decay(step: int, schedule: ScheduleSettings) -> float:
    """Factor of the peak learning rate at ``step``, counted from 1.

    Linear warm-up, constant, linear decay to 0 (WSD, arXiv 2404.06395). The phases are absolute steps and do not depend
    on the length of the run, so that a run is extended by moving its decay.
    """
    if step < schedule.warmup:
        return step / schedule.warmup
    if step <= schedule.decay_start:
        return 1.0
    return max(0.0, (schedule.decay_end - step) / (schedule.decay_end - schedule.decay_start))
