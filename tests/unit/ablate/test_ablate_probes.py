"""The criteria of an early signal, and whether an early order was the last one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from opsd.ablate.probes import above_chance, monotonic, order_predicted, probe, signal_to_noise, stable_order

STEPS = [100, 200, 300, 400]
ARMS = "abcdef"


def runs(means: list[float], noise: float, seeds: int = 5) -> dict[str, dict[int, float]]:
    """Scores of arms with these means."""
    rng = np.random.default_rng(len(means))
    return {
        name: {seed: mean + noise * float(rng.normal()) for seed in range(seeds)}
        for name, mean in zip(ARMS, means, strict=False)
    }


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], -1.0), ([1, 1, 1, 1], 0.0), ([1, 3, 2, 4], 0.8), ([1, 2, 2, 3], 0.9487)],
)
def test_a_score_rises_with_the_steps(scores: list[float], expected: float) -> None:
    """As Spearman's correlation says."""
    assert monotonic(STEPS, scores) == pytest.approx(expected, abs=1e-4)
    if len(set(scores)) > 1:
        assert monotonic(STEPS, scores) == pytest.approx(stats.spearmanr(STEPS, scores).statistic)


def test_the_noise_is_that_between_seeds() -> None:
    """A rise of 3 over standard deviations of the square root of 2."""
    assert signal_to_noise(np.array([[0.0, 3.0], [2.0, 5.0]])) == pytest.approx(3 / math.sqrt(2))
    assert math.isnan(signal_to_noise(np.array([[0.0, 3.0]])))
    assert signal_to_noise(np.array([[1.0, 0.0], [1.0, 0.0]])) == -math.inf
    assert signal_to_noise(np.ones((2, 2))) == 0


def test_a_score_is_compared_with_chance() -> None:
    """The interval is that of the one-sample t test; one seed proves nothing."""
    scores = [0.31, 0.28, 0.3, 0.33]
    interval = stats.ttest_1samp(scores, 0.25).confidence_interval(0.95)
    assert above_chance(scores, 0.25) == pytest.approx((0.055, interval.low - 0.25, interval.high - 0.25))
    assert above_chance([0.5], 0.25) == (0.25, -math.inf, math.inf)


@pytest.mark.parametrize(("last", "random"), [(0.26, True), (0.40, False)])
def test_a_task_is_probed_from_a_table(last: float, random: bool) -> None:
    """Rows are seeds, columns are checkpoints."""
    noise = np.array([[-0.02], [0.0], [0.02]])
    found = probe(STEPS, (noise + np.linspace(0.2, last, 4)).tolist(), chance=0.25)
    assert (found.monotonic, found.random) == (1.0, random)
    assert found.signal_to_noise == pytest.approx((last - 0.2) / 0.02)
    assert found.above_chance == pytest.approx(last - 0.25)
    assert found.low < found.above_chance < found.high


@pytest.mark.parametrize("scores", [[[1, 2, 3]], [[1, 2, 3, math.nan]], []])
def test_a_table_with_holes_is_refused(scores: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="finite score"):
        probe(STEPS, scores, chance=0)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({"a": [1, 2, 3], "b": [2, 3, 4], "c": [3, 4, 5]}, 1.0),
        ({"a": [1, 3], "b": [2, 2], "c": [3, 1]}, -1.0),
        ({"a": [1, 3, 3], "b": [2, 2, 2], "c": [3, 1, 1]}, 0.0),
        ({"a": [1, 1], "b": [1, 2]}, 0.0),
    ],
)
def test_the_order_of_arms_is_stable(scores: dict[str, list[float]], expected: float) -> None:
    """Kendall's tau, meant over neighbours; an order that does not exist counts as 0."""
    assert stable_order(scores) == pytest.approx(expected)


def test_tau_is_kendalls_with_ties() -> None:
    first, second = [1.0, 2.0, 2.0, 4.0, 3.0], [1.0, 1.0, 3.0, 5.0, 4.0]
    scores = {name: pair for name, *pair in zip(ARMS, first, second, strict=False)}
    assert stable_order(scores) == pytest.approx(stats.kendalltau(first, second).statistic)


def test_an_order_that_stayed_has_a_narrow_interval() -> None:
    """And noise as large as the differences a wide one."""
    means = [1.0, 2.0, 3.0, 4.0]
    assert order_predicted(runs(means, 0.01), runs(means, 0.02)) == (1.0, 1.0, 1.0)
    assert order_predicted(runs(means, 0.01), runs(means[::-1], 0.01)) == (-1.0, -1.0, -1.0)
    tau, low, high = order_predicted(runs(means, 3.0), runs(means, 3.0, seeds=6))
    assert low <= tau <= high
    assert high - low > 0.5


def test_two_seeds_say_nothing_of_the_interval() -> None:
    means = [1.0, 2.0]
    assert order_predicted(runs(means, 0.01), runs(means, 0.01, seeds=2)) == (1.0, -1.0, 1.0)


@pytest.mark.parametrize(("early", "late"), [({}, {}), ({"a": {1: 1.0}}, {"a": {1: 1.0}}), (runs([1, 2], 0), {})])
def test_an_order_needs_two_arms(early: dict[str, dict[int, float]], late: dict[str, dict[int, float]]) -> None:
    with pytest.raises(ValueError, match="two arms"):
        order_predicted(early, late)
    with pytest.raises(ValueError, match="two arms"):
        stable_order({name: [*each.values()] for name, each in early.items() if name == "a"})


def test_arms_without_a_shared_seed_have_no_order() -> None:
    with pytest.raises(ValueError, match="seed"):
        order_predicted({"a": {1: 1.0}, "b": {2: 1.0}}, {"a": {1: 1.0}, "b": {2: 1.0}})
