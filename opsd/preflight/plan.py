"""What a run will take as it is configured, on the devices that it will have: ``opsd.plan`` predicts it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from opsd.checkpoints.interval import daly
from opsd.plan.figures import Figure
from opsd.plan.hardware import GPUS, Hardware, hardware_of
from opsd.plan.layout import Layout, problem
from opsd.plan.memory import memory_of
from opsd.plan.plan import ALLOWANCE, checkpoint_bytes
from opsd.plan.reliability import DAY_S, HABITS
from opsd.plan.source import tokens_of
from opsd.plan.step_time import step_time
from opsd.trainer.counts import parameters

if TYPE_CHECKING:
    from opsd.trainer.config import Config

STALL_S: Final = HABITS.stall.value


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Predictions for a run on ``ranks`` devices. Times in seconds, sizes in bytes.

    ``memory`` is per device. If the layout does not fit ``ranks``, ``problem`` says why; memory, speed and times are
    unknown then. Speed and times are unknown without ``metrics.peak_flops`` too.
    """

    ranks: int
    problem: str | None
    parameters: int
    memory: float | None
    checkpoint: int
    tokens: int
    tokens_per_s: float | None
    step_s: float | None
    train_s: float | None
    interval_s: float | None
    mttf_s: float

    @property
    def wall_s(self) -> tuple[float, float] | None:
        """Wall-clock time of the whole run, with the least and the greatest overhead of real runs."""
        return None if self.train_s is None else (self.train_s * ALLOWANCE[0], self.train_s * ALLOWANCE[1])

    @property
    def stops(self) -> float | None:
        """The expected interruptions."""
        return None if self.wall_s is None else self.wall_s[1] / self.mttf_s

    @property
    def daly_s(self) -> float:
        """The optimal checkpoint interval."""
        return daly(STALL_S, self.mttf_s)


def predict(config: Config, ranks: int) -> RunPlan:
    """What ``config`` will take on ``ranks`` devices."""
    stages = [*_stages(config)]
    wrong = next(filter(None, (problem(one, Layout.of(one), ranks) for one, _ in stages)), None)
    memory = None if wrong else max(memory_of(one, Layout.of(one), ranks).total for one, _ in stages)
    step_s = train_s = None
    if not wrong and config.metrics.peak_flops:
        hardware = _hardware(config)
        step_s = step_time(config, Layout.of(config), ranks, hardware).total
        train_s = sum(steps * step_time(one, Layout.of(one), ranks, hardware).total for one, steps in stages)
    return RunPlan(
        ranks=ranks,
        problem=wrong,
        parameters=parameters(config.model),
        memory=memory,
        checkpoint=checkpoint_bytes(config),
        tokens=tokens_of(config),
        tokens_per_s=config.data.batch * config.data.sequence / step_s if step_s else None,
        step_s=step_s,
        train_s=train_s,
        interval_s=_interval_s(config, step_s),
        mttf_s=DAY_S / (ranks * HABITS.failures.value),
    )


def _stages(config: Config) -> Iterator[tuple[Config, int]]:
    """The run as it is from stage to stage of its data, each with its steps."""
    data, end = config.data, config.run.steps + 1
    shapes = [shape for shape in data.shapes if shape.start < end]
    starts = [*(shape.start for shape in shapes), end]
    for shape, (start, following) in zip(shapes, pairwise(starts), strict=True):
        sizes = {"sequence": shape.sequence, "batch": shape.batch, "micro_batch": shape.micro_batch}
        yield config.model_copy(update={"data": data.model_copy(update=sizes)}), following - start


def _hardware(config: Config) -> Hardware:
    """The known GPU whose peak is nearest to that of the configuration, with the peak of the configuration."""
    peak = config.metrics.peak_flops
    gpu = min(GPUS, key=lambda known: abs(hardware_of(known).peak.value - peak))
    return hardware_of(gpu, config.model.dtype).given({"peak": Figure(peak, "FLOP/s", "metrics.peak_flops")})


def _interval_s(config: Config, step_s: float | None) -> float | None:
    """Seconds between checkpoints, in whatever unit the configuration gives them."""
    settings = config.checkpoint
    if settings.minutes:
        return settings.minutes * 60
    if settings.mttf_hours:
        return daly(STALL_S, settings.mttf_hours * 3600)
    return step_s * settings.every if step_s else None
