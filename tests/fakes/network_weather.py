"""A simulated network between named nodes: delay, loss, duplicates, one-way cuts, partitions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fakes.virtual_time import World


@dataclass(slots=True)
class Weather:
    """How bad the network is at present; shares of messages are from 0 to 1, delays in seconds."""

    lost: float = 0.0
    doubled: float = 0.0
    overtaking: float = 0.0
    """Share of messages that do not wait for earlier ones of the same sender to the same receiver."""
    least_delay_s: float = 0.0005
    most_delay_s: float = 0.003


class Network:
    """Carries messages: ``deliver(source, target, message)`` is called for each that arrives at a node that lives.

    A paused target gets its messages when it wakes, one that died while they were under way does not. A message is
    lost if its way is cut when it is sent or when it would arrive.
    """

    def __init__(self, world: World, chance: random.Random, deliver: Callable[[str, str, Any], object]) -> None:
        self.weather = Weather()
        self.carried = 0
        """How many messages have arrived, those at paused nodes included."""
        self._world = world
        self._chance = chance
        self._deliver = deliver
        self._cuts: set[tuple[str, str]] = set()
        self._sides: dict[str, int] = {}
        self._arrivals: dict[tuple[str, str], float] = {}

    def send(self, source: str, target: str, message: Any) -> None:
        """Send a message, which may be lost."""
        if self.passes(source, target) and self._chance.random() >= self.weather.lost:
            self._carry(source, target, message)
            if self._chance.random() < self.weather.doubled:
                self._carry(source, target, message)

    def cut(self, source: str, target: str) -> None:
        """Let no messages of ``source`` reach ``target``; the other direction is as it was."""
        self._cuts.add((source, target))

    def mend(self, source: str, target: str) -> None:
        """Undo ``cut``."""
        self._cuts.discard((source, target))

    def part(self, *sides: tuple[str, ...]) -> None:
        """Let messages pass only within a side; nodes that are on none are on one together."""
        self._sides = {name: number for number, side in enumerate(sides) for name in side}

    def heal(self) -> None:
        """Undo all cuts and partitions, and have good weather."""
        self._cuts.clear()
        self._sides.clear()
        self.weather = Weather()

    def passes(self, source: str, target: str) -> bool:
        """Whether the way from ``source`` to ``target`` is open."""
        return (source, target) not in self._cuts and self._sides.get(source) == self._sides.get(target)

    def _carry(self, source: str, target: str, message: Any) -> None:
        weather, way = self.weather, (source, target)
        arrival = self._world.now + self._chance.uniform(weather.least_delay_s, weather.most_delay_s)
        if self._chance.random() >= weather.overtaking:
            arrival = self._arrivals[way] = max(arrival, self._arrivals.get(way, 0.0))
        life = self._world.life(target)

        def arrive() -> None:
            if self.passes(source, target) and life and self._world.life(target) == life:
                self.carried += 1
                self._world.tell(target, lambda: self._deliver(source, target, message))

        self._world.at(arrival, arrive)
