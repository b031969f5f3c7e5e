"""Predictions of power and seeds beside known values; test_ablate_simulated.py has them beside simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from opsd.ablate.power import paired_spread, power_of, seeds_needed


@pytest.mark.parametrize(
    ("seeds", "effect", "alpha", "expected"),
    [(34, 0.5, 0.05, 0.808), (15, 0.8, 0.05, 0.821), (10, 1.0, 0.05, 0.803), (199, 0.2, 0.05, 0.802)],
)
def test_power_is_that_of_published_tables(seeds: int, effect: float, alpha: float, expected: float) -> None:
    """Sample sizes of the paired t test at 80 % power, as G*Power has them."""
    assert power_of(seeds, effect, 1.0, alpha=alpha) == pytest.approx(expected, abs=0.002)
    assert seeds_needed(effect, 1.0, alpha=alpha) == seeds


@pytest.mark.parametrize(("arms", "looks"), [(1, 1), (10, 1), (10, 3)])
@pytest.mark.parametrize("effect", [0.3, 1.0, 3.0, 30.0])
def test_the_seeds_needed_are_the_fewest(effect: float, arms: int, looks: int) -> None:
    found = seeds_needed(-effect, 1.0, arms=arms, looks=looks)
    assert found is not None
    assert power_of(found, effect, 1.0, arms=arms, looks=looks) >= 0.8
    assert power_of(found - 1, effect, 1.0, arms=arms, looks=looks) < 0.8


def test_more_arms_and_looks_need_more_seeds() -> None:
    needed = [seeds_needed(0.5, 1.0, arms=arms, looks=looks) for arms, looks in ((1, 1), (1, 3), (10, 1), (10, 3))]
    assert needed == [51, 62, 74, 85]


@pytest.mark.parametrize(
    ("effect", "spread", "most", "expected"),
    [
        (0.01, 1.0, 1000, None),
        (0.5, 1.0, 20, None),
        (0.0, 1.0, 1000, None),
        (0.0, 0.0, 1000, None),
        (1.0, 0.0, 1000, 4),
    ],
)
def test_what_cannot_be_had_is_none(effect: float, spread: float, most: int, expected: int | None) -> None:
    """And without any spread the fewest pairs are enough."""
    assert seeds_needed(effect, spread, most=most) == expected


@pytest.mark.parametrize(("effect", "spread"), [(math.nan, 1.0), (1.0, math.inf), (1.0, -1.0)])
def test_a_spread_without_sense_is_refused(effect: float, spread: float) -> None:
    with pytest.raises(ValueError, match="spread"):
        seeds_needed(effect, spread)


def test_the_spread_of_a_difference_is_the_root_of_two_times_that_of_a_run() -> None:
    """A failed run says nothing of the spread."""
    assert paired_spread([1.0, 3.0, math.nan]).estimate == pytest.approx(2.0)
    with pytest.raises(ValueError, match="two runs"):
        paired_spread([1.0, math.inf])


def test_the_upper_bound_holds_as_often_as_it_says() -> None:
    """1,000 pilots of five runs: 80 %, give or take three standard errors."""
    rng = np.random.default_rng(0)
    held = np.mean([paired_spread([*row]).high >= math.sqrt(2) for row in rng.normal(size=(1000, 5))])
    assert held == pytest.approx(0.8, abs=3 * math.sqrt(0.16 / 1000))


@pytest.mark.parametrize(("effect", "spread"), [(1e300, 1.0), (0.1, 1e-300), (1e300, 1e-300), (1e8, 1.0)])
def test_an_effect_beyond_all_noise_needs_the_fewest_seeds(effect: float, spread: float) -> None:
    """The distribution overflows where no seed could hide it."""
    assert seeds_needed(effect, spread) == seeds_needed(100.0, 0.1)
