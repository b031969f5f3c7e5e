"""Robust statistics: median and scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

MAD_TO_SIGMA: Final = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""


def mad(values: Sequence[float]) -> float:
    """Median absolute deviation from the median. Raises StatisticsError without values."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of the values do not exceed. Raises IndexError if empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
