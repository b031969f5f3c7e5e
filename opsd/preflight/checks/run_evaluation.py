"""The run's evaluation pipeline, once from end to end: readable sets, a checkpoint, results.

An evaluation saved SmolLM3's run by showing that it was behind a smaller model; a pipeline that does not work saves
none. The quick profile only reads the sets.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from opsd.checkpoints.manifest import folder_of, read
from opsd.preflight import drill
from opsd.preflight.base import (
    Check,
    Context,
    CouldNotRunError,
    Finding,
    Measure,
    Measurement,
    NotApplicableError,
    Outcome,
    Progress,
    duration,
)
from opsd.preflight.base import Verdict as V
from opsd.preflight.training import config_of, devices_of, predict

if TYPE_CHECKING:
    from opsd.trainer.config import Config

STEPS: Final = 2
SETTINGS: Final = (
    f"checkpoint.every={STEPS}", "checkpoint.minutes=0", "checkpoint.mttf_hours=0", "evaluation.queue={command}",
)  # fmt: skip
RESULTS: Final = "evaluations.jsonl"
FEWEST: Final = 100
"""Items; with this many the standard error of an accuracy is 5 points (0.5 / sqrt(100))."""


def run(context: Context, progress: Progress) -> Outcome:
    """Read every set, and except in the quick profile evaluate a checkpoint of the run's own model on them."""
    config = config_of(context)
    if not config.evaluation.wanted:
        raise NotApplicableError("the run is not evaluated; set evaluation.perplexity or evaluation.cloze")
    found = list(_sets(config))
    if context.profile == "quick" or any(finding.verdict is V.FAIL for finding in found):
        return Outcome((), tuple(found))
    progress(0.1, "")
    with tempfile.TemporaryDirectory(prefix="opsd-evaluation-", dir=context.settings.local_dir or None) as name:
        seconds, problem = _evaluate(context, config, Path(name))
    if problem is not None:
        return Outcome((), (*found, problem))
    interval_s = predict(config, context.nodes * devices_of(context)).interval_s
    if interval_s is not None and seconds > interval_s:
        summary = f"an evaluation takes {duration(seconds)}, and a checkpoint comes every {duration(interval_s)}"
        found.append(Finding(V.WARN, summary, "evaluate on spares (evaluation.queue), or on smaller sets"))
    return Outcome((Measurement("duration", seconds),), tuple(found))


def _sets(config: Config) -> Iterator[Finding]:
    from opsd.trainer.data.shards import DataError
    from opsd.trainer.data.texts import read_texts
    from opsd.trainer.evaluate import at_equal_tokens
    from opsd.trainer.items import read_items

    sets = config.evaluation
    try:
        for name, path in sets.perplexity.items():
            if not any(text.strip() for text in read_texts([Path(path)])):
                yield Finding(V.FAIL, f"the evaluation set {name} has no text", f"look at {path}", name)
        for name, path in (*sets.cloze.items(), *sets.multiple_choice.items()):
            if (count := len(read_items(Path(path)))) < FEWEST:
                summary = f"the evaluation set {name} has {count} items, too few to tell one checkpoint from another"
                yield Finding(V.WARN if count else V.FAIL, summary, f"take {FEWEST} or more", name)
        if sets.reference:
            at_equal_tokens(Path(sets.reference), 0)
    except (DataError, OSError) as error:
        yield Finding(V.FAIL, str(error), "correct the paths under evaluation")


def _evaluate(context: Context, config: Config, folder: Path) -> tuple[float, Finding | None]:
    """Seconds from a durable checkpoint to its results, or what went wrong."""
    process, output = drill.start(context, config, devices_of(context), folder, STEPS, SETTINGS)
    try:
        code = process.wait(timeout=context.seconds * 3)
    except subprocess.TimeoutExpired:
        raise CouldNotRunError(f"an evaluation did not end within {duration(context.seconds * 3)}") from None
    finally:
        process.kill()
        process.wait()
    if code:
        raise CouldNotRunError(f"the run ended with {code}: {drill.last_line(output)}")
    evaluated = drill.lines(folder / RESULTS)
    if not evaluated:
        return 0.0, Finding(V.FAIL, "a checkpoint was made and never evaluated", "see evaluation.queue")
    results: Mapping[str, float] = evaluated[-1]["results"]
    if not results or not all(map(math.isfinite, results.values())):
        why = evaluated[-1].get("why") or f"results {dict(results)}"
        return 0.0, Finding(V.FAIL, f"the evaluation of a checkpoint failed: {why}", "correct the evaluation sets")
    saved = read(folder_of(folder / "checkpoints", STEPS)).created
    return float(evaluated[-1]["t"]) - saved, None


CHECK = Check(
    name="run_evaluation",
    title="Evaluation of the run's checkpoints",
    run=run,
    seconds={"quick": 10, "standard": 120, "burn-in": 300},
    measures=(
        Measure("duration", "seconds", "a durable checkpoint to its results", "lower", noise=0.5, required=False),
    ),
    needs=frozenset({"run", "torch", "exclusive"}),
    advice="correct the section [evaluation] of the run's configuration",
    runbook="eval_lag",
)
