"""Whether a task is a good early signal, from the scores of checkpoints.

The four criteria are those of FineTasks (Hugging Face 2024): monotonic, low noise, not random, stable order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from opsd.ablate.verdict import Floats, t_limit


@dataclass(frozen=True)
class Probe:
    """What the baseline's checkpoints say of one task. ``low`` and ``high`` are the interval of ``above_chance``."""

    monotonic: float
    signal_to_noise: float
    above_chance: float
    low: float
    high: float

    @property
    def random(self) -> bool:
        """Whether the last score may be chance."""
        return self.low <= 0 <= self.high


def probe(steps: Sequence[int], scores: Sequence[Sequence[float]], *, chance: float, alpha: float = 0.05) -> Probe:
    """Judge a task by ``scores``: one row for each seed, one column for each of the checkpoints ``steps``.

    ``chance`` is the score of guessing. Raises ValueError if rows and steps differ in length, or a score is not finite.
    """
    table = np.asarray(scores, np.float64)
    if table.ndim != 2 or table.shape[1] != len(steps) or len(steps) < 2 or not np.isfinite(table).all():
        raise ValueError(f"a probe needs two checkpoints, and of each seed a finite score at all {len(steps)}")
    above, low, high = above_chance(table[:, -1], chance, alpha=alpha)
    return Probe(monotonic(steps, table.mean(axis=0)), signal_to_noise(table), above, low, high)


def monotonic(steps: ArrayLike, scores: ArrayLike) -> float:
    """The rank correlation of step and score (Spearman 1904), from -1 to 1; 0 if the score is constant."""
    first, second = _ranks(steps), _ranks(scores)
    first, second = first - first.mean(), second - second.mean()
    scale = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / scale if scale else 0.0


def signal_to_noise(scores: Floats) -> float:
    """The rise of the mean score from first to last checkpoint, over its standard deviation between seeds.

    Rows are seeds. Not a number with one seed; infinite if all seeds agree.
    """
    if len(scores) < 2:
        return math.nan
    rise = float(scores[:, -1].mean() - scores[:, 0].mean())
    noise = math.sqrt(float(scores.var(axis=0, ddof=1).mean()))
    return rise / noise if noise else math.copysign(math.inf, rise) if rise else 0.0


def above_chance(scores: Sequence[float] | Floats, chance: float, *, alpha: float = 0.05) -> tuple[float, float, float]:
    """How far the mean of the seeds' scores is above ``chance``, and its interval at 1 - alpha (Student's t)."""
    values = np.asarray(scores, np.float64) - chance
    mean = float(values.mean())
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = float(values.std(ddof=1) / math.sqrt(len(values)) * t_limit(alpha / 2, len(values) - 1))
    return mean, mean - half, mean + half


def stable_order(scores: Mapping[str, Sequence[float]]) -> float:
    """How well arms keep their order: the mean of Kendall's tau between consecutive checkpoints, from -1 to 1.

    ``scores`` has the same checkpoints for each arm. Raises ValueError with fewer than two arms or checkpoints.
    """
    table = np.array(list(scores.values()), np.float64).T
    if table.ndim != 2 or min(table.shape) < 2:
        raise ValueError("an order needs two arms and two checkpoints")
    return float(_tau(table[:-1], table[1:]).mean())


def order_predicted(
    early: Mapping[str, Mapping[int, float]],
    late: Mapping[str, Mapping[int, float]],
    *,
    alpha: float = 0.05,
    draws: int = 2000,
) -> tuple[float, float, float]:
    """Whether the arms' order early in training was their order at the end: Kendall's tau with its interval.

    Mappings are from arm to seed to score. The interval is a percentile bootstrap over the seeds that all arms have at
    both times (Efron 1979); it is from -1 to 1 with fewer than three. It is of these arms, not of arms in general.
    Raises ValueError with fewer than two arms or without a shared seed.
    """
    arms = sorted(early.keys() & late.keys())
    sides = [[side[arm] for arm in arms] for side in (early, late)]
    shared = sorted(set.intersection(*({*each} for side in sides for each in side))) if arms else []
    if len(arms) < 2 or not shared:
        raise ValueError("an order needs two arms with a seed that all of them have, early and late")
    first, last = (np.array([[each[seed] for seed in shared] for each in side], np.float64) for side in sides)
    tau = float(_tau(first.mean(axis=1), last.mean(axis=1)))
    if len(shared) < 3:
        return tau, -1.0, 1.0
    drawn = np.random.default_rng(0).integers(0, len(shared), (draws, len(shared)))
    again = _tau(first[:, drawn].mean(axis=-1).T, last[:, drawn].mean(axis=-1).T)
    low, high = np.quantile(again, [alpha / 2, 1 - alpha / 2])
    return tau, float(low), float(high)


def _ranks(values: ArrayLike) -> Floats:
    """The rank of each value from 1; equal values share the mean of their ranks."""
    _, which, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[which])


def _tau(first: Floats, second: Floats) -> Floats:
    """Kendall's tau-b (Kendall 1945) between orders; arms are the last axis. 0 if one side has no order."""
    one, other = np.triu_indices(first.shape[-1], 1)
    a, b = np.sign(first[..., one] - first[..., other]), np.sign(second[..., one] - second[..., other])
    scale = np.sqrt((a != 0).sum(axis=-1) * (b != 0).sum(axis=-1))
    return np.asarray(np.where(scale > 0, (a * b).sum(axis=-1) / np.maximum(scale, 1), 0.0))
