"""Simulated studies at alpha 1 %: how often a verdict is wrong, and how often an effect is found.

Seeds are fixed, so the results do not vary. ``test_every_setting`` has all settings. The others are the hardest ones.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from opsd.ablate.verdict import decide, judge
from tests.fakes.simulated_studies import ALPHA, NOISES, SETTINGS, STUDIES, Study, decides, effect_with, simulate

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
