"""Tokens of ranks that share their batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opsd.adapters.shared import Share


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 16))
def test_the_shares_add_up(batches: list[int], sharing: int) -> None:
    """Whatever the ranks that share a batch: together they count its tokens, but for fractions that wait."""
    rank, counted = Share(), 0
    for tokens in batches:
        rank.add(tokens, sharing)
        counted += rank.take()
    assert sum(batches) - sharing < counted * sharing <= sum(batches)
