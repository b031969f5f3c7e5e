"""The run that is about to start, as checks see it: its configuration, its layout, its predicted needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from pydantic import TypeAdapter, ValidationError

from opsd.checkpoints.interval import daly
from opsd.plan.forecast import DAY_S, HABITS
from opsd.plan.hardware import GPUS, Figure, Hardware, hardware_of
from opsd.plan.layout import Layout, problem
from opsd.plan.memory import memory_of
from opsd.plan.plan import ALLOWANCE, checkpoint_bytes
from opsd.plan.search import step_time
from opsd.plan.source import tokens_of
from opsd.preflight.base import Context, CouldNotRunError, Demand, NotApplicableError
from opsd.preflight.engine import NO_RUN, count_gpus
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


CPU_RANKS = 2
_PATIENCE_S: Final = 60.0
"""Importing the trainer from a cold network file system takes many seconds."""


def config_of(context: Context) -> Config:
    """The run's configuration. Raises NotApplicableError if there is none, CouldNotRunError if it is invalid."""
    if not context.train:
        raise NotApplicableError(NO_RUN)
    try:
        from opsd.trainer.config import ConfigError, load
    except ImportError as error:
        raise CouldNotRunError(
            f"the trainer cannot be imported in {sys.executable} ({error}): install what it needs with `deploy/install "
            "--train`, or start this with the Python of the training: PYTHON -m opsd preflight …"
        ) from error
    try:
        return load(context.train, context.overrides)
    except ConfigError as error:
        raise CouldNotRunError(str(error)) from error


def devices_of(context: Context) -> int:
    """Devices of one node: its required or present GPUs, or two processes on a machine without GPUs."""
    return context.settings.gpus or count_gpus(context) or CPU_RANKS


def demand_of(context: Context) -> Demand:
    """The run's demands on one node; the demand of ``context`` if there is no run, or none that can be read."""
    try:
        plan = plan_of(context, config_of(context))
    except (NotApplicableError, CouldNotRunError):
        return context.demand
    return replace(
        context.demand,
        tokens_per_s=plan.tokens_per_s and plan.tokens_per_s / context.nodes,
        checkpoint_bytes=plan.checkpoint / context.nodes,
        checkpoint_interval_s=plan.interval_s,
    )


def demand_by(python: str, context: Context) -> Demand:
    """``demand_of`` in the interpreter ``python``: the training's has the trainer, this one may not."""
    if not context.train or python == sys.executable:
        return demand_of(context)
    command, known = [python, "-P", "-m", "opsd.preflight.training"], TypeAdapter(Context).dump_json(context)
    try:
        done = subprocess.run(command, input=known, capture_output=True, timeout=_PATIENCE_S, check=True)
        return TypeAdapter(Demand).validate_json(done.stdout)
    except (OSError, subprocess.SubprocessError, ValidationError):
        return context.demand


def plan_of(context: Context, config: Config) -> RunPlan:
    """The predictions for the run on all its nodes."""
    return predict(config, context.nodes * devices_of(context))


if __name__ == "__main__":
    sys.stdout.buffer.write(
        TypeAdapter(Demand).dump_json(demand_of(TypeAdapter(Context).validate_json(sys.stdin.buffer.read())))
    )
