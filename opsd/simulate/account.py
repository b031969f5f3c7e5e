"""Where the time of a simulated run goes: buckets that sum to the wall clock."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final, Literal, get_args

Bucket = Literal[
    "productive",
    "fewer_nodes",
    "slow_nodes",
    "checkpoint",
    "lost_work",
    "detection",
    "restart",
    "queue",
    "waiting",
    "person",
]  # fmt: skip
BUCKETS: Final[tuple[Bucket, ...]] = get_args(Bucket)
TOLD: Final[Mapping[Bucket, str]] = {
    "productive": "steps that count, at full speed",
    "fewer_nodes": "speed that missing nodes took",
    "slow_nodes": "speed that slow nodes took",
    "checkpoint": "stalls for checkpoints",
    "lost_work": "steps that were done again",
    "detection": "until a fault is noticed",
    "restart": "from the decision to the first step",
    "queue": "through Slurm's queue",
    "waiting": "too few nodes",
    "person": "until a person resubmits the run",
}
_IDLE: Final = ("detection", "restart", "queue", "waiting", "person")


class Account:
    """One run's seconds. Ranks compute from ``work`` to the next ``idle``; a checkpoint ends each ``interval_s``."""

    def __init__(self, interval_s: float, stall_s: float) -> None:
        self.seconds: dict[Bucket, float] = dict.fromkeys(BUCKETS, 0.0)
        self.lost_s: dict[str, float] = defaultdict(float)
        """By the kind of fault that cost them."""
        self.longest_s = 0.0
        """The longest time without a step."""
        self.interruptions = 0
        """How often ranks have stopped, for whatever reason."""
        self.work_s = 0.0
        """The work that the run has kept, in seconds of all nodes; steps are counted from it."""
        self._interval_s, self._stall_s = interval_s, stall_s
        self._bucket: Bucket = "queue"
        self._since = self._still_since = 0.0
        self._paces: list[tuple[float, float, float]] = []
        """Since when ranks work with which share of the nodes, and how fast."""
        self._furthest_s = 0.0
        self._cause = ""
        self._unsafe_since: float | None = None
        """Since when no checkpoint can be completed."""

    def storage(self, now: float, *, up: bool) -> None:
        """The storage is away from now on: what is saved meanwhile is safe when it is back."""
        if up:
            self._unsafe_since = None
        elif self._unsafe_since is None:
            self._unsafe_since = now

    def saved_s(self, now: float) -> float:
        """The work that a restart would begin with."""
        if not self.working:
            return self.work_s
        spells = self._spells(now, self._saved(now - self._since))
        return self.work_s + sum(good * rate * speed for _, good, rate, speed in spells)

    def rewind(self, work_s: float, cause: str) -> None:
        """Go back to ``work_s`` while nobody works: what the run has kept since then was wrong."""
        wrong_s = self.work_s - work_s
        self.seconds["productive"] -= wrong_s
        self.seconds["lost_work"] += wrong_s
        self.lost_s[cause] += wrong_s
        self.work_s = self._furthest_s = work_s

    def steps(self, step_s: float, now: float) -> tuple[int, int]:
        """The furthest step that was made, and the last one that was saved."""
        made_s = saved_s = self.work_s
        if self.working:
            for made, good, rate, speed in self._spells(now, self._saved(now - self._since)):
                made_s, saved_s = made_s + made * rate * speed, saved_s + good * rate * speed
        return int(max(self._furthest_s, made_s) / step_s), int(saved_s / step_s)

    @property
    def working(self) -> bool:
        """Whether ranks compute."""
        return self._bucket == "productive"

    def work(self, now: float, rate: float, speed: float = 1.0) -> None:
        """Steps are made from now on, by the share ``rate`` of the nodes, at ``speed`` (0 to 1) of the usual."""
        self._close(now, kept=True)
        self.longest_s = max(self.longest_s, now - self._still_since)
        self._bucket, self._since, self._cause = "productive", now, ""
        self._paces = [(now, rate, speed)]

    def pace(self, now: float, speed: float) -> None:
        """The nodes that work are faster or slower from now on."""
        if self.working and speed != self._paces[-1][2]:
            self._paces.append((now, self._paces[-1][1], speed))

    def idle(self, now: float, bucket: Bucket, cause: str | None = None, *, kept: bool = False) -> None:
        """No steps from now on, for ``cause`` if it is new. Work since the last checkpoint is lost unless ``kept``."""
        if self.working:
            self._still_since, self._cause = now, cause or ""
            self.interruptions += 1
        self._close(now, kept=kept)
        self._bucket, self._since = bucket, now
        self._cause = self._cause if cause is None else cause

    def close(self, now: float) -> None:
        """The end of the simulation: what was done counts."""
        if not self.working:
            self.longest_s = max(self.longest_s, now - self._still_since)
        self._close(now, kept=True)
        self._since = now

    def _close(self, now: float, *, kept: bool) -> None:
        passed = now - self._since
        if not self.working:
            self.seconds[self._bucket] += passed
            if self._cause and self._bucket in _IDLE:
                self.lost_s[self._cause] += passed
            return
        worked = self._worked(passed)
        kept_s = worked if kept else self._saved(passed)
        self.seconds["checkpoint"] += passed - worked
        self.seconds["lost_work"] += worked - kept_s
        made_s = saved_s = 0.0
        for made, good, rate, speed in self._spells(now, kept_s):
            self.seconds["productive"] += good * rate * speed
            self.seconds["fewer_nodes"] += good * (1 - rate)
            self.seconds["slow_nodes"] += good * rate * (1 - speed)
            made_s += made * rate * speed
            saved_s += good * rate * speed
        self._furthest_s = max(self._furthest_s, self.work_s + made_s)
        self.work_s += saved_s
        if self._cause:
            self.lost_s[self._cause] += worked - kept_s

    def _spells(self, now: float, kept_s: float) -> Iterator[tuple[float, float, float, float]]:
        """Of each pace: seconds of computing, those of them among the first ``kept_s``, share of nodes and speed."""
        ends = [begin for begin, _, _ in self._paces[1:]]
        for (begin, rate, speed), end in zip(self._paces, [*ends, now], strict=True):
            start_s, end_s = self._worked(begin - self._since), self._worked(end - self._since)
            yield end_s - start_s, max(0.0, min(end_s, kept_s) - start_s), rate, speed

    def _saved(self, passed: float) -> float:
        """Seconds of computing, of ``passed`` since the first step, that a checkpoint has."""
        if self._unsafe_since is not None:
            passed = min(passed, max(0.0, self._unsafe_since - self._since))
        return math.floor(passed / (self._interval_s + self._stall_s)) * self._interval_s

    def _worked(self, passed: float) -> float:
        """Seconds of ``passed`` since the first step in which ranks computed: a checkpoint ends each interval."""
        cycles, rest = divmod(passed, self._interval_s + self._stall_s)
        return cycles * self._interval_s + min(rest, self._interval_s)
