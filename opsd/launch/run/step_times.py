"""What a launcher tells the leader about the steps of its ranks: a sample of them, small enough for thousands of ranks.

Steps are sampled by their number, so that all launchers choose the same ones: those that a power of two divides, as
many as make ``SAMPLE_S`` or more from one to the next. Two launchers that choose neighbouring powers, because their
ranks differ a little, still have steps in common.
"""

from __future__ import annotations

import base64
import binascii
import math
import sys
from array import array
from collections.abc import Mapping
from statistics import median

from opsd.launch.run.messages import StepTimes
from opsd.rank_page import RankPage, StepRecord
from opsd.stragglers.judge import BACKWARD, COMPUTE, DATA, FORWARD, GPU, STEP

SAMPLE_S = 0.5
SETTLED_STEPS = 10
"""The first steps of a rank compile and autotune."""
KEPT = 8
"""Sampled steps of a rank that wait to be told; of more the newest."""
MOST_BYTES = 24_000
"""Of the encoded times in one message, which has at most 64 KiB."""
PHASES = (FORWARD, BACKWARD, COMPUTE, DATA, GPU, STEP)
"""The reported times of each step, in this order."""
Seconds = tuple[float, ...]
_LEAST_S, _PER_NAT = 1e-5, 1000
"""Times are sent as logarithms, exact to a thousandth of their value, from 10 microseconds to years."""


class StepSampler:
    """Collects the sampled steps of the ranks of one launcher from their pages."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    def collect(self, pages: Mapping[int, RankPage]) -> None:
        """Take in what is new on the pages."""
        self._ranks = {rank: self._ranks.get(rank) or _Rank() for rank in pages}
        for rank, page in pages.items():
            self._ranks[rank].collect(page)

    def take(self) -> StepTimes | None:
        """The sampled steps that all ranks here have done since the last call, None without any."""
        if not self._ranks:
            return None
        ranks = sorted(self._ranks)
        common = sorted(set.intersection(*(set(self._ranks[rank].steps) for rank in ranks)))
        most = max(1, MOST_BYTES // (len(ranks) * len(PHASES) * 2 * 4 // 3))
        steps = common[-most:]
        if not steps:
            return None
        seconds = [s for rank in ranks for step in steps for s in self._ranks[rank].steps[step]]
        for rank in self._ranks.values():
            rank.forget(steps[-1])
        gpus = tuple(-1 if (gpu := self._ranks[rank].gpu) is None else gpu for rank in ranks)
        places = [self._ranks[rank].place for rank in ranks]
        known = [number for place in places if place is not None for number in place]
        whole = tuple(known) if None not in places else ()
        return StepTimes(tuple(ranks), tuple(steps), gpus, encode(seconds), whole)


class _Rank:
    def __init__(self) -> None:
        self.steps: dict[int, Seconds] = {}
        self.gpu: int | None = None
        self.place: tuple[int, int, int, int] | None = None
        self._writer = 0, 0.0
        self._counted = 0

    def collect(self, page: RankPage) -> None:
        if self._writer != (page.pid, page.created):
            self.steps, self._writer, self._counted = {}, (page.pid, page.created), SETTLED_STEPS
        new = page.steps_reported - self._counted
        if new <= 0 or not page.steps:
            return
        self._counted, self.gpu, self.place = page.steps_reported, page.gpu, page.place
        every = interval(median(step.duration_s for step in page.steps[-16:]))
        self.steps.update({step.step: times(step) for step in page.steps[-new:] if step.step % every == 0})
        for old in sorted(self.steps)[:-KEPT]:
            del self.steps[old]

    def forget(self, until: int) -> None:
        self.steps = {step: seconds for step, seconds in self.steps.items() if step > until}


def interval(duration_s: float) -> int:
    """Steps from one sample to the next: the least power of two that makes ``SAMPLE_S``; at most 64."""
    every = 1
    while every < 64 and every * duration_s < SAMPLE_S:
        every *= 2
    return every


def times(step: StepRecord) -> Seconds:
    """Seconds of each of ``PHASES``. What has no phase of its own counts as computing."""
    return (
        step.phase("forward"),
        step.phase("backward"),
        step.phase("optimizer") + step.phase("other"),
        step.phase("data"),
        step.gpu_s,
        step.duration_s,
    )


def encode(seconds: list[float]) -> str:
    """Two bytes a value, in base64."""
    packed = array("H", (_code(value) for value in seconds))
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode("ascii")


def _code(seconds: float) -> int:
    if not seconds > _LEAST_S:
        return 0
    return min(65_535, 1 + round(_PER_NAT * math.log(seconds / _LEAST_S)))


def decode(text: str, count: int) -> list[float]:
    """The ``count`` values of ``encode``. Raises ValueError."""
    try:
        packed = array("H", base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, TypeError) as error:
        raise ValueError(f"times that are not encoded: {error}") from error
    if len(packed) != count:
        raise ValueError(f"{len(packed)} times instead of {count}")
    if sys.byteorder == "big":
        packed.byteswap()
    return [_LEAST_S * math.exp((code - 1) / _PER_NAT) if code else 0.0 for code in packed]
