"""Figures from runs that have been: how often they failed, what a restart took, what evaluation and data have cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from opsd.calibration.evidence import Evidence, NotUsable
from opsd.report.run import NoReport, RunReport, read_run

LEAST_EVENTS: Final = 5
"""Of failures, restarts or checkpoints: fewer are no rate."""
LEAST_S: Final = 3600.0
"""Of training: a shorter run is no measure of what a long one loses."""
_ASKED_FOR: Final = ("restart_requested", "node_retired")


def read(path: Path) -> RunReport:
    """The run in the folder ``path``. Raises NotUsable."""
    try:
        run = read_run(path)
    except NoReport as error:
        raise NotUsable(f"{error}; give the folder of a run") from error
    if not run.gpus or run.ledger.buckets["productive"] < LEAST_S:
        why = "shorter than an hour" if run.gpus else "a run without GPUs"
        raise NotUsable(f"{path} is {why}, from which nothing follows for long ones: give another run")
    return run


def figures_of(runs: Sequence[RunReport], path: Path) -> Iterator[Evidence]:
    """The figures of all ``runs`` together; what too few events would give is left out."""
    if not runs:
        return
    gpu_days = sum(run.gpus * run.held_s for run in runs) / 86_400
    productive = sum(run.ledger.buckets["productive"] for run in runs)
    at = max(run.ended for run in runs)
    name = f"{len(runs)} runs" if len(runs) > 1 else f"run {runs[0].run}"

    def of(figure: str, value: float, what: str) -> Evidence:
        return Evidence(figure, value, f"{what} of {name}, {gpu_days:,.0f} GPU-days", path, at)

    restarts = [restart for run in runs for restart in run.restarts]
    asked = sum(restart.kind in _ASKED_FOR for restart in restarts)
    for figure, number in (("failures", len(restarts) - asked), ("maintenance", asked)):
        if number >= LEAST_EVENTS:
            yield of(figure, number / gpu_days, f"{number} interruptions")
    took = [restart.down_s for restart in restarts if restart.down_s is not None]
    if len(took) >= LEAST_EVENTS:
        yield of("restart", median(took), f"median of {len(took)} restarts")
    saved = sum(len(run.checkpoints) for run in runs)
    stalled = sum(run.ledger.buckets["checkpoint_stall"] for run in runs)
    if saved >= LEAST_EVENTS and stalled:
        yield of("stall", stalled / saved, f"mean of {saved} checkpoints")
    yield of("data", sum(run.ledger.buckets["data_stall"] for run in runs) / productive, "stalls")
    yield of("evaluation", sum(run.evaluated_s for run in runs) / productive, "evaluations")
    yield of("slow", sum(map(_slow_s, runs)) / productive, "steps slower than the median")


def _slow_s(run: RunReport) -> float:
    """Seconds that all steps together took longer than if each had been the median step."""
    usual = median(step.seconds / step.count for step in run.steps)
    return max(0.0, run.ledger.buckets["productive"] - (run.ledger.steps - run.repeated) * usual)
