"""All layouts of a run on a number of GPUs: which fit and how fast they are, and why the others are out. Pure.

Also the speed over the number of GPUs at the same batch, and what keeps it from growing with them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from opsd.plan.hardware import Hardware
from opsd.plan.layout import RECOMPUTE, Layout, micro_batches_of, problem, schedules, spreads
from opsd.plan.memory import GIB, Memory, memory_of
from opsd.plan.step_time import StepTime, step_time
from opsd.trainer.config import Config

_MOST_TOKENS: Final = 1 << 17
"""Of a micro-batch on a GPU: larger ones gain nothing, and take memory."""


class CannotPlan(ValueError):
    """There is no plan; the message is one sentence that says why and what to change."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that runs, with its memory and time."""

    layout: Layout
    memory: Memory
    step: StepTime


@dataclass(frozen=True, slots=True)
class Excluded:
    """A layout that does not run, with the reason; ``lacks`` are bytes, if memory is all that it lacks."""

    layout: Layout
    reason: str
    lacks: float | None = None


@dataclass(frozen=True, slots=True)
class Search:
    """Layouts from the fastest on, one for each spread over the GPUs, and those that do not run."""

    fitting: tuple[Candidate, ...]
    out: tuple[Excluded, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """How many layouts each kind of reason has ruled out, the most frequent first."""
        return dict(Counter(each.reason.partition(":")[0] for each in self.out).most_common())


def search(config: Config, gpus: int, hardware: Hardware) -> Search:
    """Every layout worth a look. Raises CannotPlan if none runs."""
    found = list(_all(config, gpus, hardware))
    fitting = [each for each in found if isinstance(each, Candidate)]
    out = tuple(each for each in found if isinstance(each, Excluded))
    if not fitting:
        raise CannotPlan(f"no layout runs on {gpus:,} GPUs: {_hopeless(out)}")
    return Search(tuple(sorted(fitting, key=_rank)), out)


def fastest(config: Config, gpus: int, hardware: Hardware) -> Candidate | None:
    """The fastest layout, None if none runs."""
    return min((each for each in _all(config, gpus, hardware) if isinstance(each, Candidate)), key=_rank, default=None)


def _rank(candidate: Candidate) -> tuple[float, float]:
    return candidate.step.total, candidate.memory.total


def _all(config: Config, gpus: int, hardware: Hardware) -> Iterator[Candidate | Excluded]:
    for spread in spreads(config, gpus, int(hardware.nvlink_gpus.value)):
        tried = [_best(config, layout, gpus, hardware) for layout in schedules(config, spread)]
        yield min((each for each in tried if isinstance(each, Candidate)), key=_rank, default=tried[0])


def _best(config: Config, spread: Layout, gpus: int, hardware: Hardware) -> Candidate | Excluded:
    """The fastest micro-batch and recomputation of a spread that fit, or why none does."""
    room, least, why = hardware.memory.value, math.inf, ""
    fitting = []
    for micro_batch in micro_batches_of(config, spread, gpus):
        if micro_batch > 1 and micro_batch * config.data.sequence / spread.cp > _MOST_TOKENS:
            break
        for recompute in RECOMPUTE:
            layout = replace(spread, micro_batch=micro_batch, recompute=recompute)
            if found := problem(config, layout, gpus):
                why = why or found
                if recompute == "none":
                    break  # the others have no fewer demands
                continue
            memory = memory_of(config, layout, gpus)
            least = min(least, memory.total)
            if memory.total <= room:
                fitting.append(Candidate(layout, memory, step_time(config, layout, gpus, hardware)))
                break  # more recomputation is slower
    if fitting:
        return min(fitting, key=_rank)
    if least == math.inf:
        return Excluded(spread, why)
    return Excluded(
        spread, f"memory: a GPU needs {least / GIB:,.1f} GiB at least and has {room / GIB:.1f}", least - room
    )


def _hopeless(out: Sequence[Excluded]) -> str:
    """The reason of the layout that is nearest to one that runs, and what to do."""
    if tight := [(each.lacks, each.reason) for each in out if each.lacks is not None]:
        return f"{min(tight)[1].removeprefix('memory: ')}; take more GPUs, or larger ones"
    batch = (each.reason for each in out if each.reason.startswith("data.batch"))
    why = next(batch, out[0].reason if out else "the layers do not divide")
    return f"{why}; take another number of them, or another data.batch"


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
