"""The course of one simulated value over time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from opsd.scenarios.model import Value


@dataclass
class Signal:
    """``value`` at second ``at``, then ``rate`` per second, up to ``target`` if there is one; None while absent."""

    value: float
    at: float = 0.0
    rate: float = 0.0
    target: float | None = None
    noise: float = 0.0
    absent: bool = False

    def exact(self, now: float) -> float:
        """The value at second ``now`` without its noise."""
        value = self.value + self.rate * (now - self.at)
        if self.target is not None and (value - self.target) * self.rate >= 0:
            return self.target
        return value

    def read(self, now: float, rng: random.Random) -> float | None:
        """What a collector reads at second ``now``."""
        if self.absent:
            return None
        value = self.exact(now) if self.rate else self.value
        return rng.gauss(value, self.noise) if self.noise else value

    def become(self, value: Value, now: float) -> None:
        """Take a new course from second ``now`` on."""
        present = self.exact(now)
        self.absent = value == "absent"
        if isinstance(value, float | int):
            self.value, self.at, self.rate, self.target = float(value), now, 0.0, None
        elif not isinstance(value, str):
            self.noise = self.noise if value.noise is None else value.noise
            self.value, self.at, self.target = present + (value.add or 0.0), now, None
            self.rate = value.rate or 0.0
            if value.to is not None and value.over > 0:
                self.target = value.to
                self.rate = (value.to - self.value) / value.over
            elif value.to is not None:
                self.value = value.to
