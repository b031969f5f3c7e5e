"""The audit of shards and copies, and its checksum."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from opsd.trainer.checksums import checksum
from opsd.trainer.saving import Checksums, RegionChecksum, different_copies, equal_shards


def rank(**tensors: tuple[int, str]) -> Checksums:
    return {name: RegionChecksum((row, 0), bits) for name, (row, bits) in tensors.items()}


def test_shards_that_differ_and_copies_that_agree_are_fine() -> None:
    """What tensor parallelism should look like gives nothing."""
    ranks = [rank(query=(0, "a"), norm=(0, "n")), rank(query=(4, "b"), norm=(0, "n"))]
    assert equal_shards(ranks, {"query"}) == {}
    assert not list(different_copies(ranks))


def test_shards_drawn_from_one_seed_are_found() -> None:
    """The same bits in two places of a tensor that is drawn at random are named, with the ranks that hold them."""
    ranks = [
        rank(key=(0, "a"), query=(0, "c"), norm=(0, "1")),
        rank(key=(4, "b"), query=(4, "c"), norm=(4, "1")),
        rank(key=(8, "a"), query=(8, "c"), norm=(8, "1")),
    ]
    assert equal_shards(ranks, {"key", "query"}) == {(0, 2): ["key"], (0, 1, 2): ["query"]}


def test_copies_that_differ_are_found() -> None:
    """Of a region that two ranks hold, one has other bits."""
    ranks = [rank(norm=(0, "n")), rank(norm=(0, "n")), rank(norm=(0, "x")), rank(norm=(8, "y"))]
    assert list(different_copies(ranks)) == [("norm", [0, 1, 2])]


def test_a_tensor_that_only_some_have_is_compared_between_these() -> None:
    """The embedding is in the first and the last stage only."""
    ranks = [rank(embedding=(0, "a")), rank(), rank(embedding=(0, "b"))]
    assert list(different_copies(ranks)) == [("embedding", [0, 2])]
    assert equal_shards(ranks, {"embedding"}) == {}


@given(size=st.integers(1, 300), data=st.data())
def test_one_bit_changes_the_checksum(size: int, data: st.DataObject) -> None:
    """Any flipped bit and any two values that change places show."""
    values = torch.arange(1, size + 1, dtype=torch.float32)
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 31))
    flipped = values.clone()
    flipped.view(torch.int32)[at] ^= -(2**31) if bit == 31 else 1 << bit
    assert checksum(flipped) != checksum(values)
    if size > 1:
        assert checksum(values.flip(0)) != checksum(values)
    assert checksum(values.clone().view(1, -1)) == checksum(values)


def test_half_precision_has_checksums_too() -> None:
    """Tensors of 16-bit numbers are summed up word by word."""
    values = torch.randn(9).bfloat16()
    assert len(checksum(values)) == 16
    assert checksum(values) != checksum(-values)
