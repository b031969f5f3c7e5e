"""The order of the samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.order import permute, sequences

SIZES = st.integers(1, 3000)
SEEDS = st.integers(0, 2**63)


def u64(values: object) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@given(size=SIZES, seed=SEEDS, epoch=st.integers(0, 1000))
def test_an_epoch_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    """Every epoch visits every sequence exactly once."""
    samples = u64(range(epoch * size, (epoch + 1) * size))
    assert np.array_equal(np.sort(sequences(samples, size, seed)), np.arange(size))


@given(size=SIZES, seed=SEEDS, start=st.integers(0, 10**13), world=st.integers(1, 16), batch=st.integers(1, 4))
def test_world_size_does_not_change_the_order(size: int, seed: int, start: int, world: int, batch: int) -> None:
    """Ranks that read alternate micro-batches together read what one rank reads."""
    steps = 3
    alone = sequences(u64(range(start, start + steps * world * batch)), size, seed)
    parts = [
        sequences(u64([start + (step * world + rank) * batch + row for row in range(batch)]), size, seed)
        for step in range(steps)
        for rank in range(world)
    ]
    assert np.array_equal(np.concatenate(parts), alone)


@given(size=SIZES, seed=SEEDS, sample=st.integers(0, 10**13))
def test_a_sample_does_not_depend_on_its_batch(size: int, seed: int, sample: int) -> None:
    """A sample is the same one read alone or among others, so a run can begin anywhere."""
    alone = sequences(u64([sample]), size, seed)[0]
    assert sequences(u64(range(sample, sample + 5)), size, seed)[0] == alone


@settings(max_examples=20)
@given(size=st.integers(2, 2**62), key=SEEDS)
def test_huge_ranges_stay_inside(size: int, key: int) -> None:
    """Corpora far beyond memory are permuted into their own range, without collisions."""
    index = u64(np.linspace(0, size - 1, min(size, 200), dtype=np.uint64))
    index = np.unique(np.minimum(index, np.uint64(size - 1)))
    placed = permute(index, size, np.full(index.shape, key, dtype=np.uint64))
    assert placed.max() < size
    assert np.unique(placed).size == index.size


def test_epochs_and_seeds_differ() -> None:
    """Each epoch and each seed has an order of its own, and none is the order of the files."""
    size = 1000
    orders = [sequences(u64(range(e * size, (e + 1) * size)), size, seed) for seed in (0, 1) for e in (0, 1)]
    orders.append(np.arange(size, dtype=np.uint64))
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.count_nonzero(one == other) < 20


def test_neighbours_are_scattered() -> None:
    """Consecutive samples lie far apart: their mean distance is that of a random order, a third of the corpus."""
    size = 100_000
    order = sequences(u64(range(size)), size, 3).astype(np.int64)
    assert np.abs(np.diff(order)).mean() == pytest.approx(size / 3, rel=0.02)
