"""What the differences between two passes mean: whose they are, and whether a GPU or the program made them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opsd.trainer.replay import Difference, judge, suspects

PLACES = st.integers(0, 50)


@given(first=PLACES, later=st.lists(st.integers(51, 99), min_size=3, max_size=3), wrong=st.integers(0, 3))
def test_of_ranks_that_exchange_activations_the_first_is_named(first: int, later: list[int], wrong: int) -> None:
    """A wrong value is seen by the rank that computed it before the others receive it."""
    places = [*later[:wrong], first, *later[wrong:]]
    differences = [Difference(place, True, 0) for place in places]
    assert suspects(differences, [[0, 1, 2, 3]]) == [[wrong]]


def test_of_stages_the_one_is_named_through_which_the_micro_batch_passes_first() -> None:
    """Forward that is the lower stage, backward the higher one, at any place in the stage's own trace."""
    forward = [Difference(9, True, 0), Difference(1, True, 1), Difference(2, False, 0)]
    assert suspects(forward[:2], [[0, 1]]) == [[0]]
    backward = [Difference(5, False, 0), Difference(40, False, 1)]
    assert suspects(backward, [[0, 1]]) == [[1]]
    assert suspects([forward[2], forward[1]], [[0, 1]]) == [[1]]


def test_each_micro_batch_has_suspects_of_its_own() -> None:
    """Groups in which nothing differs are left out, and ranks that differ in the same place are all named."""
    differing = Difference(3, True, 0)
    assert suspects([None, None, differing, differing], [[0, 1], [2, 3]]) == [[2, 3]]
    assert suspects([differing, None, None, differing], [[0, 1], [2, 3]]) == [[0], [3]]


@given(st.tuples(st.integers(), st.integers()).filter(lambda sums: sums[0] != sums[1]), st.integers())
def test_a_neighbour_that_agrees_with_itself_proves_a_gpu(own: tuple[int, int], theirs: int) -> None:
    """One that differs from itself proves that the program is not deterministic; without one nothing is proved."""
    assert judge(own, (theirs, theirs)) == "gpu"
    assert judge(own, (theirs, theirs + 1)) == "program"
    assert judge(own, None) == "unknown"
