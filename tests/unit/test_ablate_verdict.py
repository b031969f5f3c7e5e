"""Verdicts of studies: their tests, their power, early signals, and how often they are wrong."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from opsd.ablate.tasks import above_chance, monotonic, order_predicted, probe, signal_to_noise, stable_order
from opsd.ablate.verdict import Verdict, decide, fewest_pairs, judge, paired_spread, power_of, seeds_needed
from tests.fakes.simulated_studies import ALPHA, NOISES, SETTINGS, STUDIES, Study, decides, effect_with, simulate

# Verdicts: what scipy's tests say, what holds for any values, and what failed runs may not do.


NAN, INF = math.nan, math.inf

Values = dict[int, float]

NOISE = (0.3, -0.2, 0.5, 0.1, -0.4, 0.2, -0.1, 0.05)

BASELINE = dict(enumerate(np.add(3.0, NOISE).tolist()))

SWAPPED = {"better": "worse", "worse": "better", "equivalent": "equivalent", "undecided": "undecided"}


def arm(effect: float, noise: float = 0.01) -> Values:
    """The baseline's values, moved by ``effect`` and a little noise."""
    return {seed: value + effect + noise * NOISE[-seed] for seed, value in BASELINE.items()}


def only(verdicts: tuple[Verdict, ...]) -> Verdict:
    (verdict,) = verdicts
    return verdict


class TestOneArm:
    """A baseline with eight seeds beside one arm."""

    def test_p_and_interval_are_those_of_the_paired_t_test(self) -> None:
        other = dict(enumerate([2.9, 2.7, 3.3, 3.2, 2.5, 3.1, 2.8, 2.6]))
        found = only(judge(BASELINE, {"a": other}))
        known = stats.ttest_rel([*other.values()], [*BASELINE.values()])
        interval = known.confidence_interval(0.99)
        assert found.p == pytest.approx(known.pvalue)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
        assert (found.pairs, found.verdict) == (8, "undecided")

    @pytest.mark.parametrize(
        ("effect", "margin", "higher_is_better", "verdict"),
        [
            (-0.1, None, False, "better"),
            (0.1, None, False, "worse"),
            (-0.1, None, True, "worse"),
            (0.1, None, True, "better"),
            (0.1, 0.2, False, "equivalent"),
            (0.0, 0.2, False, "equivalent"),
            (0.1, 0.1, False, "worse"),
            (0.0001, None, False, "undecided"),
        ],
    )
    def test_the_word(self, effect: float, margin: float | None, higher_is_better: bool, verdict: str) -> None:
        """An effect that is real and smaller than the margin is equivalent."""
        found = only(judge(BASELINE, {"a": arm(effect)}, margin=margin, higher_is_better=higher_is_better))
        assert found.verdict == verdict, found

    @pytest.mark.parametrize(("pairs", "alpha", "verdict"), [(2, 0.5, "undecided"), (3, 0.01, "undecided")])
    def test_too_few_pairs_decide_nothing(self, pairs: int, alpha: float, verdict: str) -> None:
        """However clear the difference is."""
        few = {seed: value for seed, value in arm(-1).items() if seed < pairs}
        found = only(judge(BASELINE, {"a": few}, alpha=alpha))
        assert (found.verdict, found.p, found.pairs) == (verdict, None, pairs)
        assert f"{pairs} pairs of seeds cannot decide" in found.reason
        assert "need" in found.reason

    def test_without_a_pair_the_effect_is_no_number(self) -> None:
        found = only(judge(BASELINE, {"a": {}}))
        assert math.isnan(found.effect)
        assert (found.low, found.high, found.verdict) == (-INF, INF, "undecided")
        assert "one side has no value at 8 seeds" in found.reason

    def test_a_look_takes_its_share_of_alpha(self) -> None:
        """What one look decides, three looks may not."""
        other = arm(-0.05, noise=0.15)
        once, thrice = (only(judge(BASELINE, {"a": other}, looks=looks, alpha=0.03)) for looks in (1, 3))
        assert once.adjusted_p and thrice.adjusted_p == pytest.approx(3 * once.adjusted_p)
        assert (once.verdict, thrice.verdict) == ("better", "undecided")
        wider = only(judge(BASELINE, {"a": other}, alpha=0.01))
        assert (thrice.low, thrice.high) == pytest.approx((wider.low, wider.high))

    def test_equal_differences_of_a_coarse_metric_prove_little(self) -> None:
        """Four times one more right answer of a hundred: the step is the spread, and not 0."""
        baseline = {1: 0.52, 2: 0.52, 3: 0.55, 4: 0.49}
        found = only(judge(baseline, {"a": {seed: value + 0.01 for seed, value in baseline.items()}}, margin=0.015))
        assert found.verdict == "undecided"
        assert found.low < 0 < found.high
        same = only(judge(baseline, {"a": baseline}, margin=0.015))
        assert (same.verdict, same.effect) == ("undecided", 0.0)

    def test_an_arm_with_the_same_bits_is_equivalent(self) -> None:
        """Its values are those of the baseline, which differ from seed to seed."""
        found = only(judge(BASELINE, {"a": BASELINE}, margin=1e-6))
        assert (found.verdict, found.effect, found.low, found.high) == ("equivalent", 0.0, 0.0, 0.0)

    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            ({"alpha": 0.0}, "alpha"),
            ({"alpha": 1.0}, "alpha"),
            ({"margin": 0.0}, "margin"),
            ({"margin": NAN}, "margin"),
            ({"look": 2}, "look 2"),
            ({"look": 0, "looks": 3}, "look 0"),
        ],
    )
    def test_limits_without_sense_are_refused(self, limits: Mapping[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            judge(BASELINE, {"a": arm(0)}, **limits)  # type: ignore[arg-type]


class TestFailedRuns:
    """A value that is nan or infinite."""

    @pytest.mark.parametrize("failed", [NAN, INF, -INF])
    @pytest.mark.parametrize(
        ("effect", "side", "verdict"),
        [
            (-1.0, "arm", "undecided"),
            (1.0, "arm", "worse"),
            (0.0, "arm", "undecided"),
            (-1.0, "baseline", "better"),
            (1.0, "baseline", "undecided"),
            (0.0, "baseline", "undecided"),
            (-1.0, "both", "better"),
            (0.0, "both", "undecided"),
        ],
    )
    def test_no_side_wins_by_failing(self, failed: float, effect: float, side: str, verdict: str) -> None:
        """And sides with a failed run are not equivalent."""
        baseline, other = dict(BASELINE), arm(effect)
        for name, values in (("baseline", baseline), ("arm", other)):
            if side in (name, "both"):
                values[3] = failed
        found = only(judge(baseline, {"a": other}, margin=0.1))
        assert (found.verdict, found.pairs) == (verdict, 7)
        assert "failed at seed 3" in found.reason

    def test_a_failed_arm_does_not_ease_the_correction_of_others(self) -> None:
        """Holm's method would test the second arm more mildly, once the first is proven."""
        failed = {**arm(-1), 0: NAN}
        whole = {name: arm(0.02, noise=0.1) for name in "bc"}
        beside_failed, beside_null = (
            {each.name: each for each in judge(BASELINE, {"a": first, **whole})} for first in (failed, arm(0))
        )
        assert beside_failed["b"].adjusted_p == beside_null["b"].adjusted_p
        assert beside_failed["a"].adjusted_p == 1


class TestManyArms:
    """Holm's correction."""

    def test_each_proven_effect_makes_the_correction_milder(self) -> None:
        """The adjusted values are Holm's of the p values, by hand."""
        arms = {"a": arm(-0.5, 0.1), "b": arm(-0.1, 0.3), "c": arm(0.02, 0.3)}
        found = judge(BASELINE, arms)
        a, b, c = (each.p or 0 for each in found)
        assert a < b < c
        assert [each.adjusted_p for each in found] == pytest.approx([3 * a, max(3 * a, 2 * b), max(2 * b, c)])

    def test_where_only_holm_decides_the_interval_ends_at_zero(self) -> None:
        """The simultaneous interval alone would include zero."""
        arms = {"a": arm(-1), **{f"b{n}": arm(-0.05, noise) for n, noise in enumerate(np.linspace(0.01, 0.2, 40))}}
        at_zero = [each for each in judge(BASELINE, arms) if each.verdict == "better" and each.high == 0.0]
        assert at_zero
        assert all(each.low < each.effect < 0 for each in at_zero)

    def test_arms_without_a_value_count(self) -> None:
        """So that adding runs later cannot loosen an earlier verdict."""
        alone, beside = (judge(BASELINE, arms)[0] for arms in ({"a": arm(-1)}, {"a": arm(-1), "b": {}}))
        assert alone.adjusted_p and beside.adjusted_p == 2 * alone.adjusted_p

    def test_no_arm_no_verdict(self) -> None:
        assert judge(BASELINE, {}) == ()

    @pytest.mark.parametrize(
        ("alpha", "arms", "looks", "fewest"),
        [(0.5, 1, 1, 3), (0.05, 1, 1, 3), (0.01, 1, 1, 4), (0.01, 10, 1, 5), (0.01, 10, 3, 6), (1 / 256, 1, 1, 4)],
    )
    def test_the_fewest_pairs(self, alpha: float, arms: int, looks: int, fewest: int) -> None:
        assert fewest_pairs(alpha, arms, looks) == fewest


VALUE = st.integers(-1000, 1000).map(lambda number: number / 64)
"""Exact in binary, so that a sum does not depend on the order; many are equal."""


@st.composite
def studies(draw: st.DrawFn) -> tuple[Values, dict[str, Values]]:
    """A baseline and up to four arms; some have a large effect."""
    seeds = draw(st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True))
    baseline = {seed: draw(VALUE) for seed in seeds}
    arms = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        effect, noise = draw(st.sampled_from([0, 1, -1, 64, -64])), draw(st.sampled_from([0.0, 1 / 64, 1.0]))
        arms[name] = {seed: baseline[seed] + effect + noise * draw(VALUE) for seed in seeds}
    return baseline, arms


ALPHAS = st.sampled_from([0.01, 0.05, 0.3])

MARGINS = st.sampled_from([None, 0.5, 8.0, 1024.0])


class TestProperties:
    """For any values."""

    @given(studies(), ALPHAS, MARGINS)
    def test_the_other_direction_swaps_better_and_worse(
        self, study: tuple[Values, dict[str, Values]], alpha: float, margin: float | None
    ) -> None:
        """So do negated values."""
        baseline, arms = study
        lower = judge(baseline, arms, alpha=alpha, margin=margin)
        higher = judge(baseline, arms, alpha=alpha, margin=margin, higher_is_better=True)
        assert [SWAPPED[each.verdict] for each in lower] == [each.verdict for each in higher]
        negated = {name: {seed: -value for seed, value in each.items()} for name, each in arms.items()}
        mirrored = judge({s: -v for s, v in baseline.items()}, negated, alpha=alpha, margin=margin)
        assert [(SWAPPED[e.verdict], e.effect, e.low, e.high) for e in lower] == [
            (e.verdict, -e.effect, -e.high, -e.low) for e in mirrored
        ]

    @given(studies(), ALPHAS, MARGINS, st.sampled_from([2.0**-20, 0.5, 1024.0]))
    def test_another_unit_gives_the_same_verdict(
        self, study: tuple[Values, dict[str, Values]], alpha: float, margin: float | None, scale: float
    ) -> None:
        """Effect and interval are in that unit."""
        baseline, arms = study
        scaled = {name: {seed: scale * value for seed, value in each.items()} for name, each in arms.items()}
        first = judge(baseline, arms, alpha=alpha, margin=margin)
        second = judge(
            {s: scale * v for s, v in baseline.items()}, scaled, alpha=alpha, margin=margin and margin * scale
        )
        for one, other in zip(first, second, strict=True):
            expected = replace(one, effect=one.effect * scale, low=one.low * scale, high=one.high * scale)
            assert replace(other, reason="") == replace(expected, reason="")

    @given(studies(), ALPHAS, st.randoms(use_true_random=False))
    def test_the_order_of_seeds_and_arms_does_not_matter(
        self,
        study: tuple[Values, dict[str, Values]],
        alpha: float,
        random: Random,
    ) -> None:
        """Nor do their numbers."""
        baseline, arms = study
        renamed = dict(zip(baseline, random.sample(range(100, 200), len(baseline)), strict=True))
        names = random.sample([*arms], len(arms))
        again = judge(
            {renamed[seed]: value for seed, value in baseline.items()},
            {
                name: {renamed[seed]: arms[name][seed] for seed in random.sample([*baseline], len(baseline))}
                for name in names
            },
            alpha=alpha,
        )
        found = {each.name: each for each in again}
        for each in judge(baseline, arms, alpha=alpha):
            other = found[each.name]
            assert (each.verdict, each.effect, each.pairs) == (other.verdict, other.effect, other.pairs)
            assert (each.low, each.high) == pytest.approx((other.low, other.high))

    @given(studies(), ALPHAS, MARGINS)
    def test_an_identical_arm_is_never_better_or_worse(
        self, study: tuple[Values, dict[str, Values]], alpha: float, margin: float | None
    ) -> None:
        """Whatever the other arms are."""
        baseline, arms = study
        found = judge(baseline, {"same": baseline, **arms}, alpha=alpha, margin=margin)[0]
        assert found.verdict in ("equivalent", "undecided")
        assert found.effect == 0

    @given(studies(), ALPHAS, MARGINS, st.integers(1, 3), st.booleans())
    def test_no_verdict_contradicts_its_interval(
        self, study: tuple[Values, dict[str, Values]], alpha: float, margin: float | None, looks: int, higher: bool
    ) -> None:
        """The effect is inside, zero is not below and above, and equivalence is within the margin."""
        for each in judge(*study, alpha=alpha, margin=margin, looks=looks, higher_is_better=higher):
            assert each.low <= each.effect <= each.high
            if each.verdict in ("better", "worse"):
                rises = (each.verdict == "better") == higher
                assert each.low >= 0 < each.effect if rises else each.high <= 0 > each.effect
                assert each.adjusted_p is not None and each.adjusted_p <= alpha
            if each.verdict == "equivalent":
                assert margin and -margin < each.low <= each.high < margin
            if each.p is not None:
                assert each.adjusted_p is not None and each.p <= each.adjusted_p <= 1

    @given(studies(), ALPHAS, MARGINS, st.data())
    def test_a_failed_run_never_makes_an_arm_win(
        self, study: tuple[Values, dict[str, Values]], alpha: float, margin: float | None, data: st.DataObject
    ) -> None:
        """Nor is it equivalent."""
        baseline, arms = study
        name, seed = data.draw(st.sampled_from([*arms])), data.draw(st.sampled_from([*baseline]))
        failed = {**arms, name: {**arms[name], seed: data.draw(st.sampled_from([NAN, INF, -INF]))}}
        for each in judge(baseline, failed, alpha=alpha, margin=margin):
            if each.name == name:
                assert each.verdict in ("worse", "undecided")
                assert f"the arm failed at seed {seed}" in each.reason


def test_without_scipy_one_sentence_says_what_to_install() -> None:
    code = "import sys; sys.modules['scipy'] = None\ntry: import opsd.ablate.verdict\nexcept ImportError as e: print(e)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "verdicts of ablations need scipy: pip install 'opsd-cluster[ablate]'\n"


def test_an_arm_that_changes_nothing_is_told_as_that():
    """There is no difference that noise could explain."""
    values = {seed: 2.0 + seed / 10 for seed in range(6)}
    (verdict,) = judge(values, {"same": values}, alpha=0.05)
    assert (verdict.verdict, verdict.reason) == ("undecided", "both sides have the same value in all 6 pairs")


# Predictions of power and seeds beside known values.


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


# The criteria of an early signal, and whether an early order was the last one.


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


# Simulated studies at alpha 1 %: how often a verdict is wrong, and how often an effect is found.


POWER_MARGIN = 0.05

NULLS = [Study(noise, arms=10, looks=1, seeds=5) for noise in NOISES] + [
    Study(arms=1, looks=3, seeds=5),
    Study(arms=10, looks=3, seeds=20),
    Study(arms=10, looks=3, seeds=8, lost=1),
]


def at_most(share: float, studies: int = STUDIES) -> float:
    """The upper end of the 99 % interval of a share (Clopper and Pearson 1934)."""
    return float(stats.binomtest(round(share * studies), studies).proportion_ci(0.99).high)


@pytest.mark.parametrize("study", NULLS, ids=str)
def test_false_winners_are_one_percent_at_most(study: Study) -> None:
    """The upper end of the interval is below 1 %, but for two basins: their bound is 10 arms / 4^5 pairs = 0.98 %."""
    found = simulate(study)
    assert found.winner <= ALPHA
    assert at_most(found.winner) <= ALPHA or study.noise == "two basins"


def test_few_pairs_of_two_basins_would_break_the_level() -> None:
    """Without the least number of pairs: three pairs that agree are 9 % of ten arms, and here none is called better."""
    study = Study("two basins", arms=10, seeds=3)
    rng = np.random.default_rng(0)
    values = NOISES[study.noise].draw(rng, (STUDIES, 11, 3))
    plain = stats.ttest_rel(values[:, 1:], values[:, :1], axis=-1, alternative="less").pvalue
    assert (plain < ALPHA / 20).any(axis=-1).mean() > 0.08
    assert simulate(study).winner == 0


@pytest.mark.parametrize("effects", [[0.0] * 5 + [9.0] * 5, [0.0] + [9.0] * 9, [0.0] * 5 + [1.0] * 5], ids=str)
def test_real_effects_make_no_others_win(effects: list[float]) -> None:
    """Better or worse is wrong in 1 % of the studies at most, and no interval misses more often."""
    found = simulate(Study(arms=10, seeds=20), effects=effects)
    margin = 3 * math.sqrt(ALPHA * (1 - ALPHA) / STUDIES)
    assert found.wrong <= ALPHA + margin
    assert found.missed <= ALPHA + margin


@pytest.mark.parametrize("noise", NOISES)
def test_an_effect_as_large_as_the_margin_is_not_called_equivalent(noise: str) -> None:
    """Ten arms, each with exactly that effect: 1 % of the studies at most."""
    margin = 5 * NOISES[noise].deviation
    assert simulate(Study(noise, arms=10, seeds=5), effects=[margin] * 10, margin=margin).equivalent <= ALPHA


@pytest.mark.parametrize(
    "study",
    [Study(seeds=5), Study(arms=10, seeds=5), Study(arms=10, looks=3, seeds=20), Study(looks=3, seeds=8, lost=1)],
    ids=str,
)
@pytest.mark.parametrize("predicted", [0.5, 0.8, 0.95])
def test_the_power_is_what_was_predicted(study: Study, predicted: float) -> None:
    """Within five points; a lost seed is one pair less."""
    found = simulate(study, effects=[effect_with(predicted, study)], studies=4000, seed=1)
    assert found.first == pytest.approx(predicted, abs=POWER_MARGIN)


def test_one_call_decides_as_the_simulation_does() -> None:
    """``judge`` finds what ``decide`` found for all studies at once."""
    values = np.random.default_rng(2).normal(size=(300, 4, 6)) - [[0.0], [0.0], [2.0], [4.0]]
    difference = values[:, 1:] - values[:, :1]
    found = decide(difference.mean(axis=-1), difference.std(axis=-1, ddof=1), np.full((300, 3), 6), alpha=ALPHA)
    assert 200 < np.count_nonzero(found.sign) < 500
    for study, signs, p in zip(values, found.sign, found.adjusted_p, strict=True):
        baseline, *arms = (dict(enumerate(each.tolist())) for each in study)
        verdicts = judge(baseline, {str(n): arm for n, arm in enumerate(arms)})
        assert [each.verdict for each in verdicts] == ["better" if sign else "undecided" for sign in -signs]
        assert [each.adjusted_p for each in verdicts] == pytest.approx(p)


def test_an_arm_that_fails_where_it_is_bad_does_not_win() -> None:
    """The arm's bad runs end as nan, and those that are left look good: a t test of them finds a fifth better."""
    values = np.random.default_rng(3).normal(size=(800, 2, 8))
    values[:, 1][values[:, 1] > 0.3] = math.nan
    kept = [arm[np.isfinite(arm)] - baseline[np.isfinite(arm)] for baseline, arm in values]
    alone = [stats.ttest_1samp(each, 0, alternative="less").pvalue < 0.1 for each in kept if len(each) > 2]
    found = [judge(dict(enumerate(b)), {"a": dict(enumerate(a))}, alpha=0.2)[0].verdict for b, a in values]
    assert sum(alone) / len(alone) > 0.2
    assert found.count("better") / len(found) < 0.1


@pytest.mark.long
@pytest.mark.parametrize("study", SETTINGS, ids=str)
def test_every_setting(study: Study) -> None:
    """False winners as above. Power is five points too low at most; noise that is not normal may add ten points."""
    assert simulate(study).winner <= ALPHA
    if decides(study):
        found = simulate(study, effects=[effect_with(0.8, study)], seed=1).first
        assert 0.8 - POWER_MARGIN <= found <= 0.8 + NOISES[study.noise].power_above
