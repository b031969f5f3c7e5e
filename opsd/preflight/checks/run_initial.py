"""The weights that the run begins with: they fit, and this trainer computes with them what transformers does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from opsd.preflight.base import Check, Context, Finding, Measure, Measurement, NotApplicableError, Outcome, Progress
from opsd.preflight.base import Verdict as V
from opsd.preflight.training import config_of


def run(context: Context, progress: Progress) -> Outcome:
    """Compare the logits of a fixed batch; the quick profile computes the first two layers only."""
    config = config_of(context)
    if not config.run.initial:
        raise NotApplicableError("the run begins with random weights; run.initial is empty")
    from opsd.trainer.config import ConfigError
    from opsd.trainer.hf.verify import compare
    from opsd.trainer.hf.weights import demand_same

    folder = Path(config.run.initial)
    try:
        demand_same(config.model, folder)
        if find_spec("transformers") is None:
            summary = "the initial weights are not compared with transformers, which is not installed"
            return Outcome((), (Finding(V.WARN, summary, "pip install transformers, and run this again"),))
        progress(0.1, "")
        found = compare(folder, 2 if context.profile == "quick" else 0)
    except ConfigError as error:
        return Outcome((), (Finding(V.FAIL, str(error), "correct run.initial or the section [model]"),))
    facts = {"layers": f"{found.layers} of {found.of_layers}"}
    findings: tuple[Finding, ...] = ()
    if not found.same:
        summary = f"{folder} computes something else here than in transformers: logits differ by {found.difference:.1e}"
        findings = (Finding(V.FAIL, summary, "do not train from it; report it with its config.json"),)
    return Outcome((Measurement("difference", found.difference),), findings, facts)


CHECK = Check(
    name="run_initial",
    title="Initial weights of the run",
    run=run,
    seconds={"quick": 60, "standard": 300, "burn-in": 300},
    measures=(
        Measure(
            "difference", "", "greatest difference of two logits, as a share of the greatest", "lower", required=False
        ),
    ),
    needs=frozenset({"run", "torch"}),
    advice="correct run.initial or the section [model] of the run's configuration",
)
