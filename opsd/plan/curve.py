"""Tokens/s over the number of GPUs at the same batch, and what keeps it from growing with them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from opsd.plan.hardware import Hardware
from opsd.plan.search import fastest
from opsd.plan.step_time import StepTime
from opsd.trainer.config import Config

_FEWER: Final = (0.125, 0.25, 0.5, 1.0)
_MORE: Final = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Of the plan's GPUs; what slows a run down shows from here on, and few layouts are left to search."""


@dataclass(frozen=True, slots=True)
class Point:
    """The fastest step on a number of GPUs."""

    gpus: int
    tokens_per_s: float
    step: StepTime

    @property
    def communication(self) -> float:
        """Share of the step that nothing hides."""
        return self.step.communication / self.step.total

    @property
    def bubble(self) -> float:
        """Share of the step."""
        return self.step.bubble / self.step.total

    def lost(self, first: Point) -> dict[str, float]:
        """By part of the step, the share of the GPUs' time that it takes beyond what it took on those of ``first``.

        The shares sum to what is missing to a speed in proportion to the GPUs; a part that takes less is negative.
        """
        whole, before = self.gpus * self.step.total, first.step.parts
        return {name: (self.gpus * s - first.gpus * before[name]) / whole for name, s in self.step.parts.items()}


@dataclass(frozen=True, slots=True)
class Peak:
    """The number of GPUs beyond which nothing is gained, and the part of the step that is to blame.

    ``slower`` is the next number that was tried, None if no layout runs on more.
    """

    gpus: int
    blame: str
    slower: int | None


def curve(config: Config, gpus: int, hardware: Hardware) -> Iterator[Point]:
    """From an eighth of ``gpus`` on, where any layout runs, until more of them are slower or 16 times as many."""
    best = 0.0
    for factor in (*_FEWER, *_MORE):
        count = gpus * factor
        if count < 1 or count != int(count) or (found := fastest(config, int(count), hardware)) is None:
            continue
        speed = config.data.batch * config.data.sequence / found.step.total
        yield Point(int(count), speed, found.step)
        if speed < best:
            return
        best = speed


def peak(points: Sequence[Point]) -> Peak:
    """The highest of ``points``, and the part of the step that has grown most from the first to there, or beyond."""
    top = next((here for here, more in pairwise(points) if more.tokens_per_s < here.tokens_per_s), None)
    last = points[-1]
    lost = last.lost(points[0])
    blame = max(lost, key=lambda name: lost[name])
    return Peak(top.gpus, blame, last.gpus) if top is not None else Peak(last.gpus, blame, None)
