"""How many seeds an effect needs, before any node is spent on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Final

import numpy as np
from numpy.typing import NDArray

from opsd.ablate.verdict import Floats, chi_square_below, fewest_pairs, shifted_t_above, t_limit

LARGEST_SHIFT: Final = 1e6
"""Beyond it every seed decides; the distribution cannot be computed for much larger ones."""


@dataclass(frozen=True)
class Spread:
    """The standard deviation of a paired difference, in the unit of the metric, and its upper confidence bound."""

    estimate: float
    high: float


def paired_spread(values: Sequence[float], *, confidence: float = 0.8) -> Spread:
    """The spread of a difference between two runs, from runs of the baseline alone with different seeds.

    The difference of two independent runs has the square root of 2 times the spread of one. Shared seeds usually make
    it smaller, and a plan from this spread is then careful. The upper bound is that of a normal distribution
    (chi-square). Raises ValueError if fewer than two values are finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        raise ValueError(f"the spread needs two runs of the baseline that ended well, not {len(finite)}")
    freedom = len(finite) - 1
    estimate = math.sqrt(2) * stdev(finite)
    return Spread(estimate, estimate * math.sqrt(freedom / chi_square_below(1 - confidence, freedom)))


def power_of(seeds: int, effect: float, spread: float, *, alpha: float = 0.01, arms: int = 1, looks: int = 1) -> float:
    """The probability that ``judge`` calls an arm with this effect better (or worse) at the last look.

    ``effect`` and ``spread``, the standard deviation of a paired difference, are in the unit of the metric. The other
    arms have no effect: each arm that has one makes Holm's correction milder. Noncentral t (Owen 1965).
    """
    return float(_powers(np.array([seeds]), effect, spread, alpha, arms, looks)[0])


def seeds_needed(
    effect: float,
    spread: float,
    *,
    alpha: float = 0.01,
    power: float = 0.8,
    arms: int = 1,
    looks: int = 1,
    most: int = 1000,
) -> int | None:
    """The fewest seeds with which ``power_of`` is at least ``power``; None if ``most`` are not enough."""
    seeds = np.arange(1, most + 1)
    enough = np.flatnonzero(_powers(seeds, effect, spread, alpha, arms, looks) >= power)
    return int(seeds[enough[0]]) if enough.size else None


def _powers(seeds: NDArray[np.int_], effect: float, spread: float, alpha: float, arms: int, looks: int) -> Floats:
    if not (math.isfinite(effect) and math.isfinite(spread) and spread >= 0):
        raise ValueError(f"effect and spread are finite, and spread is not negative: {effect}, {spread}")
    enough = seeds >= fewest_pairs(alpha, arms, looks)
    if effect == 0 or spread == 0:
        return np.where(enough & (effect != 0), 1.0, 0.0)
    freedom = np.maximum(seeds - 1, 1)
    shift = np.sqrt(seeds) * min(abs(effect) / spread, LARGEST_SHIFT)
    return np.where(enough, shifted_t_above(t_limit(alpha / (2 * arms * looks), freedom), freedom, shift), 0.0)
