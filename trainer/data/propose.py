"""Weights of a mixture proposed from small runs that were trained with other ones. Nothing is changed by it.

Each run is one point: the weights that it was trained with, and its losses on held-out sets. A linear model of the loss
over the weights is fitted. Of many random mixtures, those with the least predicted loss are averaged (RegMix, arXiv
2407.01492, section 3, with its linear regression).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from opsd.evaluations.queue import RESULTS
from opsd.trainer.config import CONFIG, Config
from opsd.trainer.data.shards import DataError

DRAWN: Final = 100_000
"""Mixtures that are compared, as in RegMix; the best ``KEPT`` of them are averaged."""
KEPT: Final = 100
_LOSS: Final = "_loss"
_RIDGE: Final = 1e-6

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ablation:
    """A run: what it was trained with, and its last losses in nats per token, by set."""

    name: str
    weights: Mapping[str, float]
    losses: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Weights by source, with the mean loss predicted for them and the least that a run has.

    ``error`` is the root of the mean squared difference between a run's loss and what the others predict for it.
    """

    weights: dict[str, float]
    predicted: float
    best: float
    error: float


def read_run(folder: Path) -> Ablation:
    """The run in ``folder``. Raises DataError."""
    try:
        config = Config.model_validate_json((folder / CONFIG).read_text(encoding="utf-8"))
        lines = (folder / RESULTS).read_text(encoding="utf-8").splitlines()
        results = [json.loads(line)["results"] for line in lines]
        found: dict[str, float] = next((result for result in reversed(results) if result), {})
        losses = {name.removesuffix(_LOSS): float(value) for name, value in found.items() if name.endswith(_LOSS)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{folder} is not the folder of a run with evaluations: {reason}") from error
    if len(config.data.stages) != 1:
        raise DataError(f"{folder} has {len(config.data.stages)} stages; a run to propose from has one")
    if not losses:
        raise DataError(f"{folder} has no loss of a set of evaluation.perplexity")
    return Ablation(folder.name, config.data.stages[0].weights, losses)


def propose(runs: Sequence[Ablation], targets: Mapping[str, float], seed: int = 0) -> Proposal:
    """The weights with the least mean of the losses, each set as often as ``targets`` says; all alike if it is empty.

    Raises DataError if the runs do not tell as much.
    """
    names = sorted({name for run in runs for name, weight in run.weights.items() if weight})
    sets = sorted(set.intersection(*(set(run.losses) for run in runs)))
    if unknown := next((name for name in targets if name not in sets), None):
        raise DataError(f"not every run has been evaluated on {unknown!r}; they share {', '.join(sets) or 'no set'}")
    if not sets:
        raise DataError("the runs share no set of evaluation.perplexity")
    if len(names) < 2 or len(runs) <= len(names):
        raise DataError(f"{len(runs)} runs of {len(names)} sources; it takes 2 sources and more runs than sources")
    weights = np.array([[run.weights.get(name, 0.0) for name in names] for run in runs])
    if np.linalg.matrix_rank(weights) < len(names):
        raise DataError("the runs have been trained with too similar mixtures; vary every source by itself")
    share = np.array([targets.get(name, 0.0) if targets else 1.0 for name in sets])
    losses = np.array([[run.losses[name] for name in sets] for run in runs]) @ (share / share.sum())
    slopes = _fit(weights, losses)
    drawn = _near(weights, seed)
    best = drawn[np.argsort(drawn @ slopes)[:KEPT]].mean(axis=0)
    left_out = [losses[row] - weights[row] @ _fit(*_without(weights, losses, row)) for row in range(len(runs))]
    error = float(np.sqrt(np.mean(np.square(left_out))))
    return Proposal(_rounded(names, best), float(best @ slopes), float(losses.min()), error)


def _fit(weights: F64, losses: F64) -> F64:
    """Weights sum to 1, so that a constant would be one parameter too many."""
    ridge = _RIDGE * np.eye(weights.shape[1])
    slopes: F64 = np.linalg.solve(weights.T @ weights + ridge, weights.T @ losses).astype(np.float64)
    return slopes


def _without(weights: F64, losses: F64, row: int) -> tuple[F64, F64]:
    return np.delete(weights, row, axis=0), np.delete(losses, row)


def _near(weights: F64, seed: int) -> F64:
    """Mixtures between those that were tried: a linear model knows nothing of what is far from them."""
    shares = np.random.default_rng(seed).dirichlet(np.full(len(weights), 0.5), DRAWN)
    drawn: F64 = (shares @ weights).astype(np.float64)
    return drawn


def _rounded(names: Sequence[str], weights: F64) -> dict[str, float]:
    """To four decimals, with the sum of 1 that the settings ask for."""
    parts = np.floor(weights * 10_000).astype(int)
    parts[np.argsort(parts - weights * 10_000)[: 10_000 - parts.sum()]] += 1
    return {name: part / 10_000 for name, part in zip(names, parts.tolist(), strict=True)}
