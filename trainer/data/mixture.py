"""Which sequence of which source each sample is: a pure function of its number, for runs of any length.

A run's position in its data is one integer, the global sample index. Stages follow each other. Within a stage samples
come in blocks, and each block contains exactly the share of every source, in random order. The last block of a stage is
cut to length and divided to the nearest sample. So the number of samples that a source has given before any block has a
closed form, and with it the position in the source: the epoch by division, the sequence by the permutation of this
source and epoch. Nothing depends on the number of ranks, and nothing grows with the number of steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from opsd.trainer.data.stages import Stage, apportion

_ENDLESS = 1 << 62
_ROW = np.uint64(32)

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


@dataclass(frozen=True, slots=True)
class Order:
    """Everything that has determined the samples of a run so far; mixtures that agree in it can follow each other.

    These are the stages that have begun, the end of the newest sample's block, and the skipped samples.
    """

    stages: tuple[tuple[int, tuple[tuple[str, float], ...]], ...]
    block_end: int
    skips: tuple[tuple[int, int], ...]

    @property
    def sources(self) -> list[str]:
        """The sources that may have been read."""
        return sorted({name for _, weights in self.stages for name, _ in weights})


class Mixture:
    """The samples of a run over ``sizes``, the number of sequences of each source.

    ``skips`` are pairs (position, length) in ascending order: after ``position`` trained samples, the next ``length``
    are skipped. The position in a run counts trained samples only.
    """

    def __init__(
        self, stages: Sequence[Stage], sizes: Mapping[str, int], seed: int, skips: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.names = tuple(sorted({name for stage in stages for name, weight in stage.weights.items() if weight}))
        self.sizes = {name: sizes[name] for name in self.names}
        self.stages, self.skips = tuple(stages), tuple(skips)
        shares = [stage.shares() for stage in stages]
        blocks = [sum(share.values()) for share in shares]
        starts = [stage.start for stage in stages]
        lengths = [end - start for start, end in pairwise([*starts, _ENDLESS])]
        last = [apportion(share, length % block) for share, length, block in zip(shares, lengths, blocks, strict=True)]
        self._starts, self._blocks = _u64(starts), _u64(blocks)
        self._full, self._rest = np.divmod(_u64(lengths), self._blocks)
        self._share, self._last = self._table(shares), self._table(last)
        given = np.cumsum(self._full[:, None] * self._share + self._last, axis=0)
        self._before = np.concatenate([np.zeros_like(given[:1]), given[:-1]])
        # Two rows a stage, of a full block and of its last one: where in the block the slots of each source end.
        ends = np.stack([self._share, self._last], axis=1).reshape(2 * len(stages), -1).cumsum(axis=1)
        self._low = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
        self._ends = (ends + (np.arange(len(ends), dtype=np.uint64)[:, None] << _ROW)).ravel()
        self._sizes = _u64(list(self.sizes.values()))
        self._stage_keys = _u64([_key(f"{seed}/stage/{start}") for start in starts])
        self._source_keys = _u64([_key(f"{seed}/source/{name}") for name in self.names])
        self._skip_from = _u64([position for position, _ in skips])
        self._skipped = _u64([0, *accumulate(length for _, length in skips)])

    def locate(self, positions: U64) -> tuple[U64, U64]:
        """Source, as an index of ``names``, and sequence of the samples at ``positions`` of a run."""
        samples = positions + self._skipped[np.searchsorted(self._skip_from, positions, side="right")]
        stage = np.searchsorted(self._starts, samples, side="right") - 1
        block, at = np.divmod(samples - self._starts[stage], self._blocks[stage])
        is_last = block == self._full[stage]
        length = np.where(is_last, self._rest[stage], self._blocks[stage])
        slot = permute(at, length, mix(self._stage_keys[stage] + mix(block)))
        row = 2 * stage + is_last
        source = np.searchsorted(self._ends, slot + (row.astype(np.uint64) << _ROW), side="right")
        source -= row * len(self.names)
        drawn = self._before[stage, source] + block * self._share[stage, source] + slot - self._low[row, source]
        epoch, index = np.divmod(drawn, self._sizes[source])
        sequence = permute(index, self._sizes[source], mix(self._source_keys[source] + mix(epoch)))
        return source.astype(np.uint64), sequence

    def drawn(self, position: int) -> dict[str, int]:
        """Samples of each source among the first ``position`` of a run, skipped ones included.

        Exact at the ends of blocks; in between each source counts in proportion to its share of the block.
        """
        sample = position + int(self._skipped[np.searchsorted(self._skip_from, position, side="right")])
        stage = int(np.searchsorted(self._starts, sample, side="right")) - 1
        block, at = divmod(sample - int(self._starts[stage]), int(self._blocks[stage]))
        share = self._last[stage] if block == self._full[stage] else self._share[stage]
        given = self._before[stage] + self._share[stage] * np.uint64(block) + share * np.uint64(at) // share.sum()
        return dict(zip(self.names, given.tolist(), strict=True))

    def identity(self, position: int) -> Order:
        """Everything that determined the samples before ``position``."""
        skips = tuple((at, length) for at, length in self.skips if at < position)
        end = position + sum(length for _, length in skips)
        begun = [stage for stage in self.stages if stage.start < end]
        block_end = 0
        if begun:
            start, block = begun[-1].start, int(self._blocks[len(begun) - 1])
            until = start + -(-(end - start) // block) * block
            block_end = min([until, *(stage.start for stage in self.stages[len(begun) :])])
        stages = tuple((stage.start, tuple(sorted((n, w) for n, w in stage.weights.items() if w))) for stage in begun)
        return Order(stages, block_end, skips)

    def _table(self, shares: Sequence[Mapping[str, int]]) -> U64:
        return _u64([[share.get(name, 0) for name in self.names] for share in shares])


def _u64(values: object) -> U64:
    return np.array(values, dtype=np.uint64)


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
