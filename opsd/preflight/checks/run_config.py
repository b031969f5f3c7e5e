"""The run's configuration, its batch script and its space for checkpoints: problems, and predictions for the run.

What the trainer itself refuses (weights that do not sum to 1, a layout that does not fit the heads) is not repeated.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from opsd.preflight.base import (
    Bounds,
    Check,
    Context,
    CouldNotRunError,
    Finding,
    Measure,
    Measurement,
    Outcome,
    Progress,
    Verdict,
    duration,
    quantity,
)
from opsd.preflight.training import STALL_S, RunPlan, config_of, plan_of
from opsd.slurm.check import of_script
from opsd.slurm.sbatch_script import seconds_of

if TYPE_CHECKING:
    from opsd.trainer.config import Config


def run(context: Context, progress: Progress) -> Outcome:
    """Read the configuration, predict the run's needs, apply every rule."""
    config = config_of(context)
    plan = plan_of(context, config)
    setting = Setting(config, plan, context.nodes, _free(Path(config.run.folder)), _script_text(context.sbatch))
    return Outcome(tuple(_measurements(plan)), tuple(findings(setting)), _facts(plan))


def _measurements(plan: RunPlan) -> list[Measurement]:
    predicted = {
        "parameters": plan.parameters, "memory": plan.memory, "checkpoint": plan.checkpoint,
        "speed": plan.tokens_per_s, "wall_clock": plan.wall_s[1] if plan.wall_s else None, "interruptions": plan.stops,
    }  # fmt: skip
    return [Measurement(name, value) for name, value in predicted.items() if value is not None]


def _facts(plan: RunPlan) -> dict[str, str]:
    facts = {"devices": str(plan.ranks), "tokens": f"{plan.tokens:,}", "checkpoint": quantity(plan.checkpoint, "bytes")}
    if plan.wall_s:
        facts["wall clock"] = f"{duration(plan.wall_s[0])} to {duration(plan.wall_s[1])}"
    return facts


def _free(folder: Path) -> float | None:
    """Bytes free at the run's folder, which need not exist yet."""
    existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    return None if existing is None else float(shutil.disk_usage(existing).free)


def _script_text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8") if path else None
    except (OSError, UnicodeDecodeError) as error:
        raise CouldNotRunError(
            f"the batch script {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _predicted(name: str, unit: str, text: str) -> Measure:
    return Measure(name, unit, f"predicted {text}", required=False, limits=Bounds())


CHECK = Check(
    name="run_config",
    title="Configuration of the run, and what it will take",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "burn-in"), 2),
    measures=(
        _predicted("parameters", "", "parameters"),
        _predicted("memory", "bytes", "memory of a device"),
        _predicted("checkpoint", "bytes", "size of a checkpoint"),
        _predicted("speed", "tokens_per_second", "throughput"),
        _predicted("wall_clock", "seconds", "wall-clock time"),
        _predicted("interruptions", "", "interruptions"),
    ),
    needs=frozenset({"run", "torch"}),
    advice="change the configuration or the batch script",
)


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
