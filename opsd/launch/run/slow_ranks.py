"""Step times of ranks: what launchers tell of them, and which rank the leader takes for slow.

What a launcher tells the leader about the steps of its ranks: a sample of them, small enough for thousands of ranks.

Steps are sampled by their number, so that all launchers choose the same ones: those that a power of two divides, as
many as make ``SAMPLE_S`` or more from one to the next. Two launchers that choose neighbouring powers, because their
ranks differ a little, still have steps in common.
"""

from __future__ import annotations

import base64
import binascii
import math
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from opsd.events import StragglerFound
from opsd.launch.io.loop import Timer, Timers
from opsd.launch.io.reporting import print_message
from opsd.launch.run.messages import StepTimes
from opsd.rank_page import RankPage, StepRecord
from opsd.stragglers.judge import LEAST_STEPS, judge
from opsd.stragglers.trace import BACKWARD, COMPUTE, DATA, FORWARD, GPU, STEP, Place, Slowdown, Trace

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


# The leader's watch for slow ranks: gathers the step times of all nodes, announces who is slow and when it is over.
#
# Nobody is restarted or replaced for it: the event lets the agent of that node open an incident, and people decide.


FOUND, GONE = "straggler_found", "straggler_gone"
LOOK_S = 2.0
MOST_SHARE = 0.1
"""Of the time, that is spent on judging at most: with very many ranks it is done less often."""
SHORT, LONG = LEAST_STEPS, 16
"""Steps that are judged: few, to be quick, and many, for a small excess in noisy times and for uneven work."""
LONG_EVERY = 5
"""One look of so many judges the long window."""
SURE = 0.9
"""What is less sure than this is announced when a second look, among the next ``LONG_EVERY``, shows it too."""
STEPS_KEPT = 24
"""Sampled steps remembered of each rank."""
REPEAT_S = 60.0
"""How often a straggler that stays is announced again, for agents that have started since."""
GONE_S = 30.0
"""A straggler that was not seen in any look for so long, and in three long ones, is gone."""
UNEVEN = 1.1
"""Uneven work is announced from this slowdown on; it is no fault, and few jobs have none."""
SILENT_S = 30.0
"""Ranks without a report for this long are not waited for."""

Announce = Callable[[str, dict[str, Any]], None]


@dataclass(slots=True)
class _OwnSteps:
    place: Place
    heard: float
    steps: dict[int, Seconds] = field(default_factory=dict)


@dataclass(slots=True)
class _Announced:
    """A verdict that was announced; ``told`` and ``seen`` in monotonic seconds."""

    verdict: Slowdown
    told: float
    seen: float


class SlowRankWatch:
    """Judges while the leader leads. ``announce`` is called with ``FOUND`` or ``GONE`` and the fields of the event."""

    def __init__(self, loop: Timers, announce: Announce, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._announce = announce
        self._clock = clock
        self._ranks: dict[int, _OwnSteps] = {}
        self._announced: dict[tuple[str, ...], _Announced] = {}
        self._suspected: dict[tuple[str, ...], int] = {}
        self._timer: Timer | None = None
        self._judged_step: int | None = None
        self._epoch = self._looks = 0
        self._look_s = LOOK_S

    def add(self, node: str, told: StepTimes) -> None:
        """Step times of the ranks of ``node``."""
        now, ranks, steps = self._clock(), told.ranks, told.steps
        try:
            seconds = decode(told.seconds, len(ranks) * len(steps) * len(PHASES))
        except ValueError as error:
            print_message(f"{node} tells {error}; they are ignored")
            return
        values = iter(seconds)
        for rank, place in zip(ranks, _places(node, told), strict=False):
            own = self._ranks.get(rank)
            if own is None or own.place != place:
                own = self._ranks[rank] = _OwnSteps(place, now)
            own.heard = now
            for step in steps:
                own.steps[step] = tuple(next(values) for _ in PHASES)
            for old in sorted(own.steps)[:-STEPS_KEPT]:
                del own.steps[old]
        if self._timer is None:
            self._timer = self._loop.later(self._look_s, self._look)

    def forget(self) -> None:
        """The generation has ended, or another launcher leads. Announced stragglers are kept."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._ranks, self._judged_step, self._suspected = None, {}, None, {}
        self._epoch += 1

    def _look(self) -> None:
        self._timer = None
        trace = self._trace()
        if trace is None or trace.steps[-1] == self._judged_step:
            return
        self._judged_step, epoch = trace.steps[-1], self._epoch

        def judging() -> tuple[tuple[Slowdown, ...], float]:
            began = time.thread_time()
            return judge_windows(trace, long=long), time.thread_time() - began

        def judged(result: tuple[tuple[Slowdown, ...], float] | OSError) -> None:
            if isinstance(result, OSError):
                return
            verdicts, took_s = result
            self._look_s = max(LOOK_S, took_s / MOST_SHARE)
            if epoch == self._epoch:
                self._conclude(verdicts, trace)

        long = self._looks % LONG_EVERY == 0
        self._looks += self._loop.run_in_thread(judging, judged, key="slow ranks")

    def _trace(self) -> Trace | None:
        """The steps that all ranks have in common, None if they are too few."""
        now = self._clock()
        live = {rank: own for rank, own in sorted(self._ranks.items()) if now - own.heard < SILENT_S}
        if len(live) < 2:
            return None
        steps = sorted(set.intersection(*(set(own.steps) for own in live.values())))
        if len(steps) < LEAST_STEPS:
            return None
        seconds = {
            phase: {rank: [own.steps[step][index] for step in steps] for rank, own in live.items()}
            for index, phase in enumerate(PHASES)
        }
        return Trace({rank: own.place for rank, own in live.items()}, steps, seconds)

    def _conclude(self, verdicts: tuple[Slowdown, ...], trace: Trace) -> None:
        now, step = self._clock(), trace.steps[-1]
        for verdict in verdicts:
            key = _key(verdict)
            known = self._announced.get(key)
            if known is None and not self._confirmed(key, verdict):
                continue
            if known is None or now - known.told >= REPEAT_S:
                self._announced[key] = _Announced(verdict, now, now)
                self._announce(FOUND, {**_fields(verdict, step, len(trace.places))})
            else:
                known.seen = now
        for key, known in list(self._announced.items()):
            if now - known.seen >= max(GONE_S, 3 * LONG_EVERY * self._look_s):
                del self._announced[key]
                self._announce(GONE, {**_fields(known.verdict, step, len(trace.places))})

    def _confirmed(self, key: tuple[str, ...], verdict: Slowdown) -> bool:
        """Whether the verdict is sure, or was reached in one of the last looks, too."""
        before = self._suspected.get(key)
        self._suspected[key] = self._looks
        return verdict.confidence >= SURE or (before is not None and self._looks - before <= LONG_EVERY)


def _places(node: str, told: StepTimes) -> list[Place]:
    """The places of the ranks of ``node``; without a layout they are all taken to do equal work."""
    gpus = [gpu if gpu >= 0 else None for gpu in told.gpus]
    if len(told.places) != 4 * len(gpus):
        return [Place(node, gpu) for gpu in gpus]
    return [Place(node, gpu, *told.places[4 * index : 4 * index + 4]) for index, gpu in enumerate(gpus)]


def judge_windows(trace: Trace, *, long: bool) -> tuple[Slowdown, ...]:
    """What the last few steps show; with ``long`` also what only more of them show, and uneven work that costs much."""
    found = {_key(verdict): verdict for verdict in judge(trace.last(SHORT), uneven=False)}
    if long and len(trace.steps) >= LONG:
        for verdict in judge(trace.last(LONG)):
            if verdict.culprits or verdict.slowdown >= UNEVEN:
                found.setdefault(_key(verdict), verdict)
    return tuple(found.values())


def _key(verdict: Slowdown) -> tuple[str, ...]:
    """What makes two verdicts the same: the nodes, or the cause where nobody is to blame."""
    return verdict.nodes or (verdict.cause,)


def _fields(verdict: Slowdown, step: int, compared: int) -> StragglerFound:
    """The fields of the event."""
    return {
        "rank": verdict.culprits[0] if verdict.culprits else None,
        "ranks": list(verdict.culprits),
        "culprit_nodes": list(verdict.nodes),
        "gpus": list(verdict.gpus),
        "cause": verdict.cause,
        "slowdown": round(verdict.slowdown, 3),
        "confidence": verdict.confidence,
        "evidence": list(verdict.evidence),
        "advice": verdict.advice,
        "source": verdict.source,
        "step": step,
        "compared": compared,
    }


def concerns(fields: Mapping[str, Any], ranks: list[int]) -> bool:
    """Whether the event is about one of ``ranks``; what concerns nobody is told by the node of rank 0."""
    named = fields.get("ranks")
    return not set(named if isinstance(named, list) and named else [0]).isdisjoint(ranks)
