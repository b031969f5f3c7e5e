"""What one trial of a scenario has shown, and what many of them come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.integration.slurm.training import Training


@dataclass(frozen=True, slots=True)
class Trial:
    """``gap_s`` from the last step before to the first new one; ``failed`` says why there is none."""

    gap_s: float
    lost_steps: int
    failed: str = ""

    def __str__(self) -> str:
        return self.failed or f"{self.gap_s:.2f} s, {self.lost_steps} steps lost"


Scenario = Callable[[int, Callable[[Trial], None]], None]
"""Makes so many trials, and gives away each as it ends."""


def failure(error: Exception) -> Trial:
    """A trial that did not come to its end."""
    return Trial(0.0, 0, str(error)[:4000])


def since(training: Training, generation: int) -> Trial:
    """The gap before ``generation``, which has made steps; failed if one before it still went on after that."""
    return Trial(training.gap_s(generation), training.lost_steps(generation), two_sides(training))


def two_sides(training: Training) -> str:
    """A sentence if a generation has made steps after a later one had begun to."""
    newest = 0
    for line in training.metrics():
        if line["generation"] < newest:
            return f"generation {line['generation']} made step {line['step']} after generation {newest} had begun"
        newest = line["generation"]
    return ""


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
    """The numbers of one scenario; the 99th percentile of so few is the largest."""
    gaps = sorted(trial.gap_s for trial in trials if not trial.failed)
    return {
        "p50_s": round(median(gaps), 2) if gaps else None,
        "p99_s": round(gaps[-1], 2) if gaps else None,
        "lost_steps_max": max((trial.lost_steps for trial in trials if not trial.failed), default=None),
        "trials": len(trials),
        "failed": sum(bool(trial.failed) for trial in trials),
    }
