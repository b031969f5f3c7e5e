"""The order of the samples: a keyed permutation, evaluated at any point in constant time and memory.

A run's place in its data is one integer, the global sample index. Sample ``k`` of a corpus of ``n`` sequences is
sequence ``permutation(k mod n)`` of epoch ``k div n``, and each epoch has a permutation of its own. Nothing is
stored, and the order does not depend on how many ranks read it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def mix(x: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that scatters its input."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: U64, size: int, key: U64) -> U64:
    """Where the permutation of range(``size``) with ``key`` takes each ``index``; ``key`` has one entry per index.

    A balanced Feistel network over the next even number of bits; a value that falls outside the range goes through
    it again until it is inside (cycle walking, Black and Rogaway 2002). The domain is less than four times the range,
    so that takes fewer than four passes on average.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    value = _feistel(index, half, key)
    outside = np.flatnonzero(value >= np.uint64(size))
    while outside.size:
        value[outside] = _feistel(value[outside], half, key[outside])
        outside = outside[value[outside] >= np.uint64(size)]
    return value


def _feistel(value: U64, half: np.uint64, key: U64) -> U64:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for number in range(1, ROUNDS + 1):
        left, right = right, left ^ (mix(right ^ mix(key + np.uint64(number))) & mask)
    return left << half | right


def sequences(samples: U64, size: int, seed: int) -> U64:
    """The sequence, in range(``size``), of each of the global sample indices ``samples``."""
    epochs, index = np.divmod(samples, np.uint64(size))
    return permute(index, size, mix(mix(epochs) + np.uint64(_GOLDEN * (seed + 1) & _WORD)))
