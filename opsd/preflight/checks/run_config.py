"""The run's configuration: its problems, and predictions for the run."""

from __future__ import annotations

import shutil
from pathlib import Path

from opsd.preflight.base import Check, Context, CouldNotRunError, Limits, Measure, Measurement, Outcome, Progress
from opsd.preflight.lint import Setting, findings
from opsd.preflight.plan import RunPlan
from opsd.preflight.training import config_of, plan_of
from opsd.preflight.units import duration, quantity


def run(context: Context, progress: Progress) -> Outcome:
    """Read the configuration, predict the run's needs, apply every rule."""
    config = config_of(context)
    plan = plan_of(context, config)
    setting = Setting(config, plan, context.nodes, _free(Path(config.run.folder)), _script(context.sbatch))
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


def _script(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8") if path else None
    except (OSError, UnicodeDecodeError) as error:
        raise CouldNotRunError(
            f"the batch script {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _predicted(name: str, unit: str, text: str) -> Measure:
    return Measure(name, unit, f"predicted {text}", required=False, limits=Limits())


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
