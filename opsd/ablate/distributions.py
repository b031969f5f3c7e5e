"""The distributions that verdicts need, from scipy, with the types that scipy leaves out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opsd import pip_install

try:
    from scipy import special  # scipy.stats has the same functions, and takes a second to import
except ImportError as error:
    raise ImportError(f"verdicts of ablations need scipy: {pip_install('ablate')}") from error

Floats = NDArray[np.float64]


def t_above(value: ArrayLike, freedom: ArrayLike) -> Floats:
    """The probability that Student's t with ``freedom`` degrees of freedom is above ``value``."""
    return np.asarray(special.stdtr(freedom, -np.asarray(value)), np.float64)


def t_limit(probability: float, freedom: ArrayLike) -> Floats:
    """The value that Student's t with ``freedom`` degrees of freedom exceeds with ``probability``."""
    return np.asarray(-special.stdtrit(freedom, probability), np.float64)


def shifted_t_above(value: ArrayLike, freedom: ArrayLike, shift: ArrayLike) -> Floats:
    """The probability that the noncentral t is above ``value``; ``shift`` is its noncentrality parameter."""
    return np.asarray(1 - special.nctdtr(freedom, shift, value), np.float64)


def chi_square_below(probability: float, freedom: float) -> float:
    """The value below which chi-square with ``freedom`` degrees of freedom is with ``probability``."""
    return float(special.chdtri(freedom, 1 - probability))
