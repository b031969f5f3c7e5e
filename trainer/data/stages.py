"""The shares of sources in a stage of a run, as whole numbers of samples. Settings are read with it, without numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

MAX_BLOCK = 1 << 20
"""Most samples in a block. Weights with a larger common denominator are rounded to this many parts."""

TOLERANCE = Fraction(1, 10**6)
"""How far the weights of a stage may be from a sum of 1."""


class MixtureError(ValueError):
    """The weights cannot be used; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Stage:
    """From sample ``start`` on, sources by weight. A weight is exactly the decimal in the settings."""

    start: int
    weights: Mapping[str, float]

    def shares(self) -> dict[str, int]:
        """Samples of each source in a block. Raises MixtureError if the weights do not sum to 1."""
        exact = {name: Fraction(repr(weight)) for name, weight in self.weights.items() if weight}
        total = sum(exact.values(), Fraction(0))
        if abs(total - 1) > TOLERANCE:
            raise MixtureError(f"the weights sum to {float(total):.9g}, not to 1")
        block = math.lcm(*(share.denominator for share in exact.values()))
        return apportion(exact, block if total == 1 and block <= MAX_BLOCK else MAX_BLOCK)


def apportion(shares: Mapping[str, Fraction | int], seats: int) -> dict[str, int]:
    """``seats`` divided in proportion to ``shares``, by largest remainder (Hamilton); ties go by name."""
    total = sum(shares.values())
    quotas = {name: Fraction(share * seats, total) for name, share in shares.items()}
    given = {name: math.floor(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: (given[name] - quotas[name], name))
    for name in by_remainder[: seats - sum(given.values())]:
        given[name] += 1
    return given
