"""Simulated studies: a baseline and arms over seeds, thousands at once.

``python -m tests.fakes.simulated_studies`` prints the table of docs/research/ablation-verdicts.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opsd.ablate.verdict import Floats, decide, fewest_pairs, power_of, spread_of

Draw = Callable[[np.random.Generator, tuple[int, ...]], Floats]
ALPHA = 0.01
STUDIES = 10_000


@dataclass(frozen=True)
class Noise:
    """What the value of a run varies by, and the standard deviation of that.

    Power is predicted for a normal distribution: ``power_above`` is how far it may be above that, by design.
    """

    draw: Draw
    deviation: float
    power_above: float = 0.05


def _outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return rng.normal(size=shape) * np.where(rng.random(shape) < 0.05, 10, 1)


def _basins(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return (rng.random(shape) < 0.5) + 0.01 * rng.normal(size=shape)


NOISES: Mapping[str, Noise] = {
    "normal": Noise(lambda rng, shape: rng.normal(size=shape), 1.0),
    "t with 3 degrees of freedom": Noise(lambda rng, shape: rng.standard_t(3, size=shape), math.sqrt(3), 0.1),
    "5 % outliers, ten times as wide": Noise(_outliers, math.sqrt(0.95 + 0.05 * 100), 0.1),
    "accuracy on 100 items": Noise(lambda rng, shape: rng.binomial(100, 0.5, size=shape) / 100, 0.05),
    "two basins": Noise(_basins, math.sqrt(0.25 + 0.01**2), 0.1),
}


@dataclass(frozen=True)
class Study:
    """A setting: ``lost`` seeds of the baseline fail, and take their pairs with them."""

    noise: str = "normal"
    arms: int = 1
    looks: int = 1
    seeds: int = 20
    lost: int = 0


@dataclass(frozen=True)
class Outcome:
    """Shares of the studies. Lower values of the metric are better.

    ``winner``: an arm was called better. ``first``: the first arm was. ``missed``: an interval did not have the true
    effect. ``wrong``: a better or worse was not the truth. ``equivalent``: an arm was called equivalent.
    """

    winner: float
    first: float
    missed: float
    wrong: float
    equivalent: float


def simulate(
    study: Study, *, effects: Sequence[float] = (), margin: float = 0.0, studies: int = STUDIES, seed: int = 0
) -> Outcome:
    """Play ``studies`` studies; ``effects`` are those of the first arms. A study ends at the first look with a winner.

    Looks come at even parts of the seeds.
    """
    rng = np.random.default_rng(seed)
    truth = np.array([*effects, *[0.0] * (study.arms - len(effects))])
    values = NOISES[study.noise].draw(rng, (studies, study.arms + 1, study.seeds))[..., study.lost :]
    values[:, 1:] += truth[:, None]
    flags = {name: np.zeros(studies, bool) for name in Outcome.__dataclass_fields__}
    going = np.ones(studies, bool)
    for look in range(study.looks):
        seeds = max(2, round(values.shape[-1] * (look + 1) / study.looks))
        arm = values[:, 1:, :seeds]
        baseline = np.broadcast_to(values[:, :1, :seeds], arm.shape)
        difference = arm - baseline
        found = decide(
            difference.mean(axis=-1),
            spread_of(difference, baseline, arm),
            np.full((studies, study.arms), seeds),
            alpha=ALPHA,
            margin=margin,
            looks=study.looks,
        )
        seen: dict[str, NDArray[np.bool_]] = {
            "winner": (found.sign < 0).any(axis=-1),
            "first": found.sign[:, 0] < 0,
            "missed": ((found.low > truth) | (found.high < truth)).any(axis=-1),
            "wrong": ((found.sign != 0) & (found.sign != np.sign(truth))).any(axis=-1),
            "equivalent": found.equivalent.any(axis=-1),
        }
        for name, flag in seen.items():
            flags[name] |= flag & going
        going &= ~seen["winner"]
    return Outcome(**{name: float(flag.mean()) for name, flag in flags.items()})


def effect_with(power: float, study: Study) -> float:
    """The effect, a lower value, that ``power_of`` predicts to be found with probability ``power``."""
    spread, (low, high) = math.sqrt(2) * NOISES[study.noise].deviation, (0.0, 1000.0)
    for _ in range(50):
        middle = (low + high) / 2
        pairs = study.seeds - study.lost
        found = power_of(pairs, middle * spread, spread, alpha=ALPHA, arms=study.arms, looks=study.looks)
        low, high = (middle, high) if found < power else (low, middle)
    return -high * spread


SETTINGS = tuple(Study(*each) for each in itertools.product(NOISES, (1, 10), (1, 3), (5, 8, 20), (0, 1)))
"""All that are measured."""


def decides(study: Study) -> bool:
    """Whether its pairs are enough for any verdict."""
    return study.seeds - study.lost >= fewest_pairs(ALPHA, study.arms, study.looks)


def main() -> None:
    """Print for each noise the most false winners with 5, 8 and 20 seeds, and the power where 80 % is predicted."""
    for noise in NOISES:
        these = [each for each in SETTINGS if each.noise == noise and decides(each)]
        found = [(each.seeds, simulate(each).winner) for each in these]
        winners = [f"{max(share for seeds, share in found if seeds == n):.2%}" for n in (5, 8, 20)]
        powers = [simulate(each, effects=[effect_with(0.8, each)], seed=1).first for each in these]
        print("|", " | ".join([noise, *winners, f"{min(powers):.0%} to {max(powers):.0%}"]), "|")


if __name__ == "__main__":
    main()
