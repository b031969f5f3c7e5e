"""Verdicts: what scipy's tests say, what holds for any values, and what failed runs may not do."""

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

from opsd.ablate.verdict import Verdict, fewest_pairs, judge

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
