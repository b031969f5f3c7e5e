"""Problems of a run before it starts: its configuration, its batch script, the space for its checkpoints. Pure.

What the trainer itself refuses (weights that do not sum to 1, a layout that does not fit the heads) is not repeated
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from opsd.preflight.base import Finding, Verdict
from opsd.preflight.plan import STALL_S, RunPlan
from opsd.preflight.units import duration, quantity
from opsd.slurm.promises import of_script
from opsd.slurm.sbatch_script import seconds_of

if TYPE_CHECKING:
    from opsd.trainer.config import Config

DALY_FACTOR: Final = 3.0
"""An interval within this factor of the best one costs little more."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The input of the rules.

    ``free`` bytes are available for checkpoints, None if unknown; ``script`` is the text of the batch script.
    """

    config: Config
    plan: RunPlan
    nodes: int = 1
    free: float | None = None
    script: str | None = None


def findings(setting: Setting) -> list[Finding]:
    """The findings of all rules."""
    rules = (_layout, _schedule, _interval, _retention, _evaluation, _denominator, _script)
    return [finding for rule in rules for finding in rule(setting)]


def _layout(setting: Setting) -> Iterator[Finding]:
    if why := setting.plan.problem:
        summary = f"memory and speed on {setting.plan.ranks} devices cannot be predicted: {why}"
        yield Finding(Verdict.WARN, summary, "change [parallel] or data.batch, or correct --nodes or preflight.gpus")


def _schedule(setting: Setting) -> Iterator[Finding]:
    schedule, steps = setting.config.schedule, setting.config.run.steps
    if schedule.warmup >= steps:
        yield Finding(
            Verdict.FAIL, f"the warm-up of {schedule.warmup} steps is longer than the run of {steps}", "shorten it"
        )
    elif schedule.kind != "multi-step" and schedule.decay_end > steps:
        summary = f"the learning rate decays until step {schedule.decay_end}, and the run ends at step {steps}"
        yield Finding(Verdict.WARN, summary, "set schedule.decay_end to run.steps unless the run will be extended")
    elif schedule.kind != "multi-step" and schedule.decay_end < steps and schedule.floor == 0:
        summary = f"the learning rate is 0 from step {schedule.decay_end} on, and the run goes on to step {steps}"
        yield Finding(Verdict.FAIL, summary, "set schedule.decay_end to run.steps, or a schedule.floor")


def _interval(setting: Setting) -> Iterator[Finding]:
    plan, config = setting.plan, setting.config
    if config.checkpoint.every >= config.run.steps:
        summary = f"checkpoint.every {config.checkpoint.every} is not reached in {config.run.steps} steps"
        yield Finding(Verdict.FAIL, summary, "a node that fails costs the whole run; save more often")
    if plan.interval_s is None:
        return
    cost = plan.interval_s / 2 / plan.mttf_s + STALL_S / plan.interval_s
    best = plan.daly_s / 2 / plan.mttf_s + STALL_S / plan.daly_s
    if plan.interval_s > DALY_FACTOR * plan.daly_s or plan.interval_s < plan.daly_s / DALY_FACTOR:
        summary = (
            f"a checkpoint every {duration(plan.interval_s)} costs {cost:.2%} of the run in lost and stalled time, one "
            f"every {duration(plan.daly_s)} {best:.2%}"
        )
        steps, minutes = max(1, round(plan.daly_s / (plan.step_s or 1.0))), plan.daly_s / 60
        wanted = f"minutes to about {minutes:.0f}" if config.checkpoint.minutes else f"every to about {steps}"
        yield Finding(Verdict.WARN, summary, f"set checkpoint.{wanted}")


def _retention(setting: Setting) -> Iterator[Finding]:
    if setting.free is None:
        return
    # One more than ``keep``: the oldest is removed once the newest is durable.
    wanted = (setting.config.checkpoint.keep + 1) * setting.plan.checkpoint
    if wanted > setting.free:
        sizes = quantity(wanted, "bytes"), quantity(setting.free, "bytes")
        summary = f"{setting.config.checkpoint.keep + 1} checkpoints need {sizes[0]}, and {sizes[1]} are free"
        yield Finding(Verdict.FAIL, summary, "make room, keep fewer, or put the run's folder elsewhere")


def _evaluation(setting: Setting) -> Iterator[Finding]:
    if not setting.config.evaluation.wanted:
        summary = "no checkpoint is evaluated: a model that learns too little looks like one that learns"
        yield Finding(Verdict.WARN, summary, "set evaluation.perplexity or evaluation.cloze, and a reference run")


def _denominator(setting: Setting) -> Iterator[Finding]:
    if setting.config.run.device == "cuda" and not setting.config.metrics.peak_flops:
        yield Finding(
            Verdict.WARN,
            "metrics.peak_flops is not set, so neither MFU nor time can be told",
            "989e12 on an H100 in bf16",
        )


def _script(setting: Setting) -> Iterator[Finding]:
    if setting.script is None:
        if setting.nodes > 1:
            yield Finding(Verdict.WARN, "no batch script was given to look at", "pass --sbatch FILE")
        return
    asked = of_script(setting.script)
    if asked.refused:
        yield Finding(Verdict.FAIL, f"sbatch does not take the batch script: {asked.refused}", "mend it")
    if not asked.requeue:
        summary = "the batch script has no --requeue: the first node that fails ends the job for good"
        yield Finding(Verdict.FAIL, summary, "add #SBATCH --requeue")
    if asked.signal is None:
        summary = "the batch script asks for no signal: at the time limit everything since the last checkpoint is lost"
        yield Finding(Verdict.FAIL, summary, "add #SBATCH --signal=USR1@300")
    if not asked.appends:
        yield Finding(Verdict.WARN, "a requeued job overwrites its log", "add #SBATCH --open-mode=append")
    if setting.nodes > 1 and not asked.no_kill:
        summary = "the batch script has no --no-kill: Slurm ends the whole job when one of its nodes fails"
        yield Finding(Verdict.FAIL, summary, "add #SBATCH --no-kill")
    nodes = asked.nodes
    if setting.nodes > 1 and nodes.isdigit() and int(nodes) <= setting.nodes:
        summary = f"the job has {nodes} nodes and the run needs {setting.nodes}: there is no spare"
        yield Finding(Verdict.WARN, summary, "ask for one or two more, and pass --spares to opsd launch")
    yield from _time_limit(asked.time, setting.plan)


def _time_limit(text: str, plan: RunPlan) -> Iterator[Finding]:
    limit, wall = seconds_of(text), plan.wall_s
    if limit is None or wall is None or limit >= wall[1]:
        return
    summary = f"the time limit is {duration(limit)} and the run takes {duration(wall[0])} to {duration(wall[1])}"
    yield Finding(Verdict.WARN, summary, f"the job will be requeued about {wall[1] / limit:.0f} times")
