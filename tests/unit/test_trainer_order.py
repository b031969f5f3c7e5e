"""Keyed permutations: the building stone of the order of the samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.trainer.data.mixture import permute

KEYS = st.integers(0, 2**64 - 1)


def u64(values: object) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def permuted(index: np.ndarray, size: int, key: int) -> np.ndarray:
    return permute(index, np.full(index.shape, size, np.uint64), np.full(index.shape, key, np.uint64))


@given(size=st.integers(1, 3000), key=KEYS)
def test_it_is_a_bijection(size: int, key: int) -> None:
    """Every element of the range is hit exactly once."""
    assert np.array_equal(np.sort(permuted(u64(range(size)), size, key)), np.arange(size))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 0.999), KEYS), min_size=1, max_size=20))
def test_elements_do_not_depend_on_each_other(elements: list[tuple[int, float, int]]) -> None:
    """With ranges and keys of their own, elements come out together as they do alone."""
    size, key = u64([size for size, _, _ in elements]), u64([key for _, _, key in elements])
    index = u64([int(size * at) for size, at, _ in elements])
    together = permute(index, size, key)
    alone = [permute(index[i : i + 1], size[i : i + 1], key[i : i + 1])[0] for i in range(len(elements))]
    assert np.array_equal(together, alone)


@settings(max_examples=20)
@given(size=st.integers(2, 2**62), key=KEYS)
def test_huge_ranges_stay_inside(size: int, key: int) -> None:
    """Corpora far beyond memory are permuted into their own range, without collisions."""
    index = u64(np.linspace(0, size - 1, min(size, 200), dtype=np.uint64))
    index = np.unique(np.minimum(index, np.uint64(size - 1)))
    placed = permuted(index, size, key)
    assert placed.max() < size
    assert np.unique(placed).size == index.size


def test_keys_differ() -> None:
    """Neighbouring keys give unrelated orders, and none is the order of the numbers."""
    size = 1000
    orders = [permuted(u64(range(size)), size, key) for key in range(4)] + [np.arange(size, dtype=np.uint64)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.count_nonzero(one == other) < 20


@pytest.mark.parametrize("size", [100_000, 65_536, 99_991])
def test_neighbours_are_scattered(size: int) -> None:
    """Consecutive elements lie as far apart as in a random order: a third of the range in the mean."""
    order = permuted(u64(range(size)), size, 3).astype(np.int64)
    assert np.abs(np.diff(order)).mean() == pytest.approx(size / 3, rel=0.02)


@pytest.mark.parametrize("size", [5, 12, 30])
def test_small_ranges_are_random_too(size: int) -> None:
    """Over many keys every element goes to every place about equally often."""
    keys = u64(range(4000)).repeat(size) * np.uint64(0x9E3779B97F4A7C15)
    index = np.tile(u64(range(size)), 4000)
    placed = permute(index, np.full(index.shape, size, np.uint64), keys)
    counts = np.zeros((size, size))
    np.add.at(counts, (index, placed), 1)
    assert counts.min() > 4000 / size * 0.6
    assert counts.max() < 4000 / size * 1.4
