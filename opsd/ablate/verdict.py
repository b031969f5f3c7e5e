"""Verdicts of a study: its tests, and the effects that they would find.

Whether an arm is better than the baseline, worse, equivalent, or undecided.

Pure functions of the value that each run ended with. docs/research/ablation-verdicts.md has their measured error rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opsd import pip_install

try:
    from scipy import special  # scipy.stats has the same functions, and takes a second to import
except ImportError as error:
    raise ImportError(f"verdicts of ablations need scipy: {pip_install('ablate')}") from error

Floats = NDArray[np.float64]
Word = Literal["better", "worse", "equivalent", "undecided"]
LEAST_PAIRS = 3
ROUNDING = 1e-12
"""Of the largest value: a smaller distance between two values is a rounding error."""

MOST_NAMED = 5
"""Seeds in a reason; of more, their number."""


@dataclass(frozen=True)
class Verdict:
    """What is known of one arm; effect, low and high are arm minus baseline, in the unit of the metric.

    The intervals of all arms and looks together hold with probability 1 - alpha. Holm's method may find an effect which
    that interval leaves open. The interval then ends at zero. ``p`` is two-sided and of this arm alone; ``adjusted_p``
    is corrected for arms and looks, and is compared with alpha. Both are None if there are too few pairs. Without a
    pair the effect is not a number, and with one pair the interval is infinite.
    """

    name: str
    verdict: Word
    effect: float
    low: float
    high: float
    pairs: int
    p: float | None
    adjusted_p: float | None
    reason: str


@dataclass(frozen=True)
class Decision:
    """The tests of many studies at once; arms are the last axis. ``sign`` is that of a proven effect, or 0."""

    p: Floats
    adjusted_p: Floats
    low: Floats
    high: Floats
    sign: NDArray[np.int_]
    equivalent: NDArray[np.bool_]


def judge(
    baseline: Mapping[int, float],
    arms: Mapping[str, Mapping[int, float]],
    *,
    alpha: float = 0.01,
    margin: float | None = None,
    higher_is_better: bool = False,
    look: int = 1,
    looks: int = 1,
) -> tuple[Verdict, ...]:
    """Compare each arm with the baseline, paired over the seeds that both have. Mappings are from seed to value.

    A run that failed has the value nan or inf; a run that has not ended is missing. ``arms`` has all arms of the study,
    also those without a value yet: the correction counts them. ``margin`` is the smallest effect of interest, in the
    unit of the metric: an arm is equivalent if its whole interval is within it. ``looks`` is the number of times that
    the study is judged, fixed before the first; each look has the same share of alpha. Raises ValueError on limits that
    make no sense.
    """
    _check(alpha, margin, look, looks)
    if not arms:
        return ()
    samples = [_Sample.of(baseline, arm) for arm in arms.values()]
    decision = decide(
        np.array([each.effect for each in samples]),
        np.array([each.spread for each in samples]),
        np.array([len(each.differences) for each in samples]),
        alpha=alpha,
        margin=np.array([0.0 if each.failed else margin or 0.0 for each in samples]),
        looks=looks,
        barred=np.array([each.wins_by_failing(higher_is_better) for each in samples]),
    )
    limits = _Limits(alpha, margin, len(arms), looks, higher_is_better)
    return tuple(_verdict(name, samples[n], decision, n, limits) for n, name in enumerate(arms))


def decide(
    effect: Floats,
    spread: Floats,
    pairs: NDArray[np.int_],
    *,
    alpha: float,
    margin: Floats | float = 0.0,
    looks: int = 1,
    barred: NDArray[np.bool_] | bool = False,
) -> Decision:
    """Test mean differences ``effect`` with standard deviation ``spread`` over ``pairs``; arms are the last axis.

    Paired t tests (Student 1908), Holm's correction over arms (Holm 1979), Bonferroni's over looks. The two one-sided
    tests of equivalence (Schuirmann 1987) are at alpha/2 each: the interval that is shown must be within the margin.
    A margin of 0 allows no equivalence; a ``barred`` arm proves nothing.
    """
    arms = effect.shape[-1]
    freedom = np.maximum(pairs - 1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = spread / np.sqrt(pairs)
        t = np.where(effect == 0, 0.0, np.abs(effect) / error)
    p = np.where(pairs < 2, 1.0, 2 * t_above(t, freedom))
    adjusted = np.minimum(1.0, looks * _holm(np.where(barred, 1.0, p)))
    half = np.where(pairs < 2, np.inf, error * t_limit(alpha / (2 * arms * looks), freedom))
    low, high = np.where(pairs < 2, -np.inf, effect - half), np.where(pairs < 2, np.inf, effect + half)
    enough = pairs >= fewest_pairs(alpha, arms, looks)
    equivalent = enough & (low > -np.asarray(margin)) & (high < margin)
    sign = np.where(enough & ~equivalent & (adjusted <= alpha), np.sign(effect), 0).astype(int)
    low, high = np.where(sign > 0, np.maximum(low, 0.0), low), np.where(sign < 0, np.minimum(high, 0.0), high)
    return Decision(p, adjusted, low, high, sign, equivalent)


def fewest_pairs(alpha: float, arms: int = 1, looks: int = 1) -> int:
    """The fewest pairs for a verdict.

    Without an effect, one pair has any given difference other than 0 with probability 1/4 at most, whatever the noise
    is: two basins of equal chance reach it. If all pairs have the same difference, no t test can tell that from an
    effect. So 1/4 to the power of the pairs, for each arm and look, must be alpha at most.
    """
    return max(LEAST_PAIRS, math.ceil(math.log(arms * looks / alpha, 4) - 1e-9))


def spread_of(differences: Floats, baseline: Floats, arm: Floats) -> Floats:
    """The standard deviation of the differences; seeds are the last axis.

    A coarse metric can have equal differences by chance: with 100 items, accuracy has steps of 0.01. Equal differences
    then say only that the spread is below that step, the smallest distance between two values, which is returned. The
    spread is 0 if an arm changes nothing: all differences are 0, and no two seeds of the baseline share a value.
    """
    spread = differences.std(axis=-1, ddof=1)
    values = np.concatenate([baseline, arm], axis=-1)
    tiny = ROUNDING * np.abs(values).max(axis=-1, keepdims=True)
    equal = np.ptp(differences, axis=-1) <= tiny[..., 0]
    if not equal.any():
        return np.asarray(spread)
    moved = np.abs(differences).max(axis=-1) > tiny[..., 0]
    coarse = moved | (_distances(baseline) <= tiny).any(axis=-1)
    distances = _distances(values)
    step = np.where(distances > tiny, distances, np.inf).min(axis=-1)
    return np.asarray(np.where(equal, np.where(coarse & np.isfinite(step), step, 0.0), spread))


def _distances(values: Floats) -> Floats:
    """The distances between neighbours in size."""
    return np.diff(np.sort(values, axis=-1), axis=-1)


def _holm(p: Floats) -> Floats:
    """Adjusted p values: the k-th smallest of m times m - k + 1, but never below a smaller one's."""
    arms = p.shape[-1]
    order = np.argsort(p, axis=-1, kind="stable")
    adjusted = np.maximum.accumulate(np.take_along_axis(p, order, -1) * np.arange(arms, 0, -1), axis=-1)
    return np.take_along_axis(adjusted, np.argsort(order, axis=-1, kind="stable"), -1)


def _check(alpha: float, margin: float | None, look: int, looks: int) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is a probability between 0 and 1, not {alpha}")
    if margin is not None and not 0 < margin < math.inf:
        raise ValueError(f"margin is the smallest effect of interest, above 0, not {margin}")
    if not 1 <= look <= looks:
        raise ValueError(f"look {look} is not among the {looks} that were planned: alpha is shared by these")


@dataclass(frozen=True)
class _Sample:
    """The pairs of one arm, and the seeds that make none."""

    differences: Sequence[float]
    spread: float
    arm_failed: Sequence[int]
    baseline_failed: Sequence[int]
    both_failed: Sequence[int]
    missing: Sequence[int]

    @classmethod
    def of(cls, baseline: Mapping[int, float], arm: Mapping[int, float]) -> _Sample:
        shared = sorted(baseline.keys() & arm.keys())
        fine = {seed: (math.isfinite(baseline[seed]), math.isfinite(arm[seed])) for seed in shared}
        seeds = [seed for seed in shared if fine[seed] == (True, True)]
        first, second = np.array([baseline[seed] for seed in seeds]), np.array([arm[seed] for seed in seeds])
        return cls(
            differences=[float(each) for each in second - first],
            spread=float(spread_of(second - first, first, second)) if len(seeds) > 1 else math.nan,
            arm_failed=[seed for seed in shared if fine[seed] == (True, False)],
            baseline_failed=[seed for seed in shared if fine[seed] == (False, True)],
            both_failed=[seed for seed in shared if fine[seed] == (False, False)],
            missing=sorted(baseline.keys() ^ arm.keys()),
        )

    @property
    def effect(self) -> float:
        return math.fsum(self.differences) / len(self.differences) if self.differences else math.nan

    @property
    def failed(self) -> bool:
        return bool(self.arm_failed or self.baseline_failed or self.both_failed)

    def wins_by_failing(self, higher_is_better: bool) -> bool:
        """Whether the side that would win has a failed run: its worst pair is then not among the differences."""
        arm_wins = self.effect > 0 if higher_is_better else self.effect < 0
        return bool(self.arm_failed if arm_wins else self.baseline_failed)


@dataclass(frozen=True)
class _Limits:
    alpha: float
    margin: float | None
    arms: int
    looks: int
    higher_is_better: bool


def _verdict(name: str, sample: _Sample, decision: Decision, n: int, limits: _Limits) -> Verdict:
    sign, pairs = int(decision.sign[n]), len(sample.differences)
    enough = pairs >= fewest_pairs(limits.alpha, limits.arms, limits.looks)
    word: Word = "equivalent" if decision.equivalent[n] else "undecided"
    if sign:
        word = "better" if (sign > 0) == limits.higher_is_better else "worse"
    return Verdict(
        name=name,
        verdict=word,
        effect=sample.effect,
        low=float(decision.low[n]),
        high=float(decision.high[n]),
        pairs=pairs,
        p=float(decision.p[n]) if enough else None,
        adjusted_p=float(decision.adjusted_p[n]) if enough else None,
        reason="; ".join([_because(word, sample, decision, n, limits), *_left_out(sample)]),
    )


def _because(word: Word, sample: _Sample, decision: Decision, n: int, limits: _Limits) -> str:
    pairs, fewest = len(sample.differences), fewest_pairs(limits.alpha, limits.arms, limits.looks)
    if pairs < fewest:
        return (
            f"{_count(pairs, 'pair')} of seeds cannot decide: {_count(limits.arms, 'arm')} and "
            f"{_count(limits.looks, 'look')} at alpha {limits.alpha:g} need {fewest}"
        )
    if word in ("better", "worse"):
        return f"the difference exceeds the noise of {pairs} pairs, with adjusted p {decision.adjusted_p[n]:.2g}"
    if word == "equivalent":
        return f"the whole interval is within the margin of {limits.margin:g}"
    if sample.wins_by_failing(limits.higher_is_better):
        return "the side with the better mean has a failed run, and no side can win by failing"
    if sample.failed and limits.margin and max(-decision.low[n], decision.high[n]) < limits.margin:
        return "the interval is within the margin, but sides with failed runs are not equivalent"
    if not any(sample.differences):
        return f"both sides have the same value in all {pairs} pairs"
    return f"the noise of {pairs} pairs may explain the difference, with adjusted p {decision.adjusted_p[n]:.2g}"


def _left_out(sample: _Sample) -> list[str]:
    """The seeds that make no pair, and why."""
    reasons = (
        ("the arm failed", sample.arm_failed),
        ("the baseline failed", sample.baseline_failed),
        ("both sides failed", sample.both_failed),
        ("one side has no value", sample.missing),
    )
    return [f"{reason} at {_named(seeds)}" for reason, seeds in reasons if seeds]


def _named(seeds: Sequence[int]) -> str:
    if len(seeds) > MOST_NAMED:
        return _count(len(seeds), "seed")
    return f"seed {', '.join(map(str, seeds))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def t_above(value: ArrayLike, freedom: ArrayLike) -> Floats:
    """The probability that Student's t with ``freedom`` degrees of freedom is above ``value``."""
    return np.asarray(special.stdtr(freedom, -np.asarray(value)), np.float64)


def t_limit(probability: float, freedom: ArrayLike) -> Floats:
    """The value that Student's t with ``freedom`` degrees of freedom exceeds with ``probability``."""
    return np.asarray(-special.stdtrit(freedom, probability), np.float64)


def shifted_t_above(value: ArrayLike, freedom: ArrayLike, shift: ArrayLike) -> Floats:
    """The probability that the noncentral t is above ``value``; ``shift`` is its noncentrality parameter."""
    return np.asarray(1 - special.nctdtr(freedom, shift, value), np.float64)


def chi_square_below(probability: float, freedom: float) -> float:
    """The value below which chi-square with ``freedom`` degrees of freedom is with ``probability``."""
    return float(special.chdtri(freedom, 1 - probability))


# How many seeds an effect needs, before any node is spent on it.


LARGEST_SHIFT: Final = 1e6
"""Beyond it every seed decides; the distribution cannot be computed for much larger ones."""


@dataclass(frozen=True)
class Spread:
    """The standard deviation of a paired difference, in the unit of the metric, and its upper confidence bound."""

    estimate: float
    high: float


def paired_spread(values: Sequence[float], *, confidence: float = 0.8) -> Spread:
    """The spread of a difference between two runs, from runs of the baseline alone with different seeds.

    The difference of two independent runs has the square root of 2 times the spread of one. Shared seeds usually make
    it smaller, and a plan from this spread is then careful. The upper bound is that of a normal distribution
    (chi-square). Raises ValueError if fewer than two values are finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        raise ValueError(f"the spread needs two runs of the baseline that ended well, not {len(finite)}")
    freedom = len(finite) - 1
    estimate = math.sqrt(2) * stdev(finite)
    return Spread(estimate, estimate * math.sqrt(freedom / chi_square_below(1 - confidence, freedom)))


def power_of(seeds: int, effect: float, spread: float, *, alpha: float = 0.01, arms: int = 1, looks: int = 1) -> float:
    """The probability that ``judge`` calls an arm with this effect better (or worse) at the last look.

    ``effect`` and ``spread``, the standard deviation of a paired difference, are in the unit of the metric. The other
    arms have no effect: each arm that has one makes Holm's correction milder. Noncentral t (Owen 1965).
    """
    return float(_powers(np.array([seeds]), effect, spread, alpha, arms, looks)[0])


def seeds_needed(
    effect: float,
    spread: float,
    *,
    alpha: float = 0.01,
    power: float = 0.8,
    arms: int = 1,
    looks: int = 1,
    most: int = 1000,
) -> int | None:
    """The fewest seeds with which ``power_of`` is at least ``power``; None if ``most`` are not enough."""
    seeds = np.arange(1, most + 1)
    enough = np.flatnonzero(_powers(seeds, effect, spread, alpha, arms, looks) >= power)
    return int(seeds[enough[0]]) if enough.size else None


def _powers(seeds: NDArray[np.int_], effect: float, spread: float, alpha: float, arms: int, looks: int) -> Floats:
    if not (math.isfinite(effect) and math.isfinite(spread) and spread >= 0):
        raise ValueError(f"effect and spread are finite, and spread is not negative: {effect}, {spread}")
    enough = seeds >= fewest_pairs(alpha, arms, looks)
    if effect == 0 or spread == 0:
        return np.where(enough & (effect != 0), 1.0, 0.0)
    freedom = np.maximum(seeds - 1, 1)
    shift = np.sqrt(seeds) * min(abs(effect) / spread, LARGEST_SHIFT)
    return np.where(enough, shifted_t_above(t_limit(alpha / (2 * arms * looks), freedom), freedom, shift), 0.0)
