"""Numbers as people read them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opsd.words import ranges


@given(st.sets(st.integers(0, 300)))
def test_ranges_name_exactly_the_numbers(numbers: set[int]) -> None:
    """In order, each once."""
    parts = [part.split("–") for part in ranges(numbers, "–").split(", ") if part]
    assert [n for low, *high in parts for n in range(int(low), int(high[0] if high else low) + 1)] == sorted(numbers)
