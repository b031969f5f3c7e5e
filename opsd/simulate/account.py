"""Where the time of a simulated run goes: buckets that sum to the wall clock."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Final, Literal, get_args

Bucket = Literal[
    "productive", "fewer_nodes", "checkpoint", "lost_work", "detection", "restart", "queue", "waiting", "person"
]
BUCKETS: Final[tuple[Bucket, ...]] = get_args(Bucket)
TOLD: Final[Mapping[Bucket, str]] = {
    "productive": "steps that count, at full speed",
    "fewer_nodes": "speed that missing nodes took",
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
        self._rate = 1.0
        self._furthest_s = 0.0
        self._cause = ""

    def steps(self, step_s: float, now: float) -> tuple[int, int]:
        """The furthest step that was made, and the last one that was saved."""
        done_s = good_s = self.work_s
        if self.working:
            done, good, _ = self._done(now, kept=False)
            done_s, good_s = done_s + done * self._rate, good_s + good * self._rate
        return int(max(self._furthest_s, done_s) / step_s), int(good_s / step_s)

    @property
    def working(self) -> bool:
        """Whether ranks compute."""
        return self._bucket == "productive"

    def work(self, now: float, rate: float) -> None:
        """Steps are made from now on, at ``rate`` (0 to 1) of the full speed."""
        self._close(now, kept=True)
        self.longest_s = max(self.longest_s, now - self._still_since)
        self._bucket, self._since, self._rate, self._cause = "productive", now, rate, ""

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
        done, good, stalled = self._done(now, kept=kept)
        self.seconds["checkpoint"] += stalled
        self.seconds["lost_work"] += done - good
        self.seconds["productive"] += good * self._rate
        self.seconds["fewer_nodes"] += good * (1 - self._rate)
        self._furthest_s = max(self._furthest_s, self.work_s + done * self._rate)
        self.work_s += good * self._rate
        if self._cause:
            self.lost_s[self._cause] += done - good

    def _done(self, now: float, *, kept: bool) -> tuple[float, float, float]:
        """Seconds of computing since its begin, those of them that are saved or ``kept``, and those of stalls."""
        cycles, rest = divmod(now - self._since, self._interval_s + self._stall_s)
        stalled = cycles * self._stall_s + max(0.0, rest - self._interval_s)
        done = now - self._since - stalled
        return done, done if kept else math.floor(cycles) * self._interval_s, stalled
