"""The run that is about to start, as checks see it: its configuration, its layout, its predicted needs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pydantic import TypeAdapter, ValidationError

from opsd.preflight.base import Context, CouldNotRunError, Demand, NotApplicableError
from opsd.preflight.engine import NO_RUN, count_gpus
from opsd.preflight.plan import RunPlan, predict

CPU_RANKS = 2
_PATIENCE_S: Final = 60.0
"""Importing the trainer from a cold network file system takes many seconds."""

if TYPE_CHECKING:
    from opsd.trainer.config import Config


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
    return context.gpus or count_gpus(context) or CPU_RANKS


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
