"""The leader's watch for slow ranks: gathers the step times of all nodes, announces who is slow and when it is over.

Nobody is restarted or replaced for it: the event lets the agent of that node open an incident, and people decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opsd.events import StragglerFound
from opsd.launch.io.loop import Timer, Timers
from opsd.launch.io.reporting import print_message
from opsd.launch.run.messages import StepTimes
from opsd.launch.run.step_times import PHASES, Seconds, decode
from opsd.stragglers.judge import LEAST_STEPS, Place, Slowdown, Trace, judge

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
KEPT = 24
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
class _Rank:
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
        self._ranks: dict[int, _Rank] = {}
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
                own = self._ranks[rank] = _Rank(place, now)
            own.heard = now
            for step in steps:
                own.steps[step] = tuple(next(values) for _ in PHASES)
            for old in sorted(own.steps)[:-KEPT]:
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
