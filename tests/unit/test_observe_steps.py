"""What counts as a step of a program with one optimizer or several."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opsd.launch.observe.observer import StepCycle


def counted(turns: list[int]) -> list[int]:
    """The positions at which a step is counted."""
    cycle = StepCycle()
    return [index for index, optimizer in enumerate(turns) if cycle.stepped(optimizer)]


@given(optimizers=st.integers(1, 6), steps=st.integers(1, 50))
def test_each_round_of_all_optimizers_is_one_step(optimizers: int, steps: int) -> None:
    """One optimizer, a GAN's two, or Muon beside AdamW: as many steps as the program has made."""
    turns = list(range(optimizers)) * steps
    found = counted(turns)
    assert len(found) == steps
    assert all(index % optimizers == optimizers - 1 for index in found[1:]), "from the second on at the end of a round"


def test_the_first_step_is_counted_at_once() -> None:
    """A program whose steps take minutes is not without progress until its second."""
    assert counted([7]) == [0]


@given(critics=st.integers(2, 8), rounds=st.integers(1, 20), first=st.booleans())
def test_an_optimizer_that_steps_more_rarely_does_not_count(critics: int, rounds: int, first: bool) -> None:
    """Five steps of the critic for one of the generator are five steps, to within one at the beginning."""
    turns = ([1] if first else []) + ([0] * critics + [1]) * rounds
    assert abs(len(counted(turns)) - critics * rounds) <= 2


@given(before=st.integers(1, 20), after=st.integers(4, 30))
def test_another_optimizer_takes_over(before: int, after: int) -> None:
    """A program that goes on with a new optimizer keeps counting, but for the first steps."""
    found = counted([0] * before + [1] * after)
    assert before + after - 3 <= len(found) <= before + after


@given(st.lists(st.integers(0, 4), max_size=200))
def test_no_more_steps_than_optimizers_have_made(turns: list[int]) -> None:
    """Whatever the order, nothing is counted twice."""
    assert len(counted(turns)) <= len(turns)
    assert not turns or counted(turns)[0] == 0
