"""The speed of FlashAttention-2, which the trainer calls, by the size of a head and the length of a sequence. Pure.

Measured on an H100 80GB SXM5 in bf16 with 16k tokens: forward with a causal mask (arXiv 2407.08608, figure 5), backward
(figure 6). Other GPUs are taken to lose as much with short sequences and small heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16384)
_FORWARD: Final = {64: (180, 229, 262, 284, 295, 299), 128: (191, 260, 298, 319, 333, 335)}
_BACKWARD: Final = {64: (198, 238, 264, 279, 287, 291), 128: (214, 260, 291, 310, 318, 322)}
"""TFLOP/s by channels of a head, for each of ``_LENGTHS``; the backward pass is counted as 2.5 times the forward."""
CHANNELS: Final = 128
LENGTH: Final = 8192
"""The shape for which ``Hardware.attention`` is given."""


def share_of_best(channels: int, length: int) -> float:
    """The rate for heads of ``channels`` and sequences of ``length``, as a share of that for 128 and 8,192.

    Between the shapes that were measured it is interpolated, beyond them it is that of the nearest.
    """
    return _rate(channels, length) / _rate(CHANNELS, LENGTH)


def _rate(channels: int, length: int) -> float:
    """TFLOP/s of both passes, the backward one counted as twice the forward, as in ``opsd.trainer.counts``."""
    small, large = (_both(size, length) for size in _FORWARD)
    return small + (large - small) * min(max(channels / 64 - 1, 0.0), 1.0)


def _both(channels: int, length: int) -> float:
    forward, backward = _at(_FORWARD[channels], length), _at(_BACKWARD[channels], length)
    return 3 / (1 / forward + 2.5 / backward)


def _at(rates: Sequence[int], length: int) -> float:
    """Interpolated over the logarithm of ``length``."""
    place = min(max(math.log2(max(length, 1) / _LENGTHS[0]), 0.0), len(_LENGTHS) - 1.0)
    low = min(int(place), len(_LENGTHS) - 2)
    return rates[low] + (rates[low + 1] - rates[low]) * (place - low)
