"""The order of the samples: keyed permutations, computed at any position in constant time and memory.

All functions work on arrays, each element with its own range and key, so a batch costs no more than one sample.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_HALF = np.uint64(32)


def mix(x: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that scrambles its input."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: U64, size: U64, key: U64) -> U64:
    """The image of ``index`` under the permutation of range(``size``) with ``key``; elementwise, size <= 2^62.

    A Feistel network over pairs (left, right) with left < a and right < b, where a and b are about the root of the size
    (Black and Rogaway 2002, "generalized Feistel"). Values outside the range go through it again until they are inside
    (cycle walking). a * b exceeds the size by less than 2 a, so for large ranges almost none do.
    """
    a = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64)
    b = (size + a - np.uint64(1)) // a
    value = _feistel(index, a, b, key)
    outside = np.flatnonzero(value >= size)
    while outside.size:
        value[outside] = _feistel(value[outside], a[outside], b[outside], key[outside])
        outside = outside[value[outside] >= size[outside]]
    return value


def _feistel(value: U64, a: U64, b: U64, key: U64) -> U64:
    right, left = np.divmod(value, a)
    for number in range(ROUNDS):
        round_key = key + np.uint64((number + 1) * _GOLDEN & (1 << 64) - 1)
        if number % 2:
            right = _rotate(right, mix(left ^ round_key), b)
        else:
            left = _rotate(left, mix(right ^ round_key), a)
    return right * a + left


def _rotate(value: U64, word: U64, size: U64) -> U64:
    """``value`` plus a number below ``size`` derived from ``word``, modulo ``size``; no division (Lemire 2019)."""
    value = value + ((word >> _HALF) * size >> _HALF)
    return value - size * (value >= size)
