"""Virtual time for simulations, and the nodes that live in it: they pause, die and start again."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Call = Callable[[], object]


class World:
    """Calls that are due at some time, in the order of their times; ``now`` is in seconds.

    What is done for a node goes through ``tell`` or ``after``: a node that is paused gets it when it wakes, one that
    has died since never does, also when it was started again.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """How many calls have been made."""
        self._due: list[tuple[float, int, Call]] = []
        self._order = itertools.count()
        self._lives: dict[str, int] = {}
        self._waiting: dict[str, list[Call]] = {}

    def later(self, delay_s: float, call: Call) -> None:
        """Call it ``delay_s`` seconds from now."""
        self.at(self.now + delay_s, call)

    def at(self, time: float, call: Call) -> None:
        """Call it at ``time``; calls for the same moment are made in the order in which they were asked for."""
        heapq.heappush(self._due, (time, next(self._order), call))

    def run(self, seconds: float) -> None:
        """Make all calls that are due within ``seconds``."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, call = heapq.heappop(self._due)
            self.events += 1
            call()
        self.now = end

    # -- nodes ---------------------------------------------------------------------------------------------------

    def start(self, name: str) -> int:
        """Let a node live, again or for the first time; the number of its life."""
        self._waiting.pop(name, None)
        self._lives[name] = abs(self._lives.get(name, 0)) + 1
        return self._lives[name]

    def kill(self, name: str) -> None:
        """End the life of a node; what was still to be done for it is forgotten."""
        self._waiting.pop(name, None)
        self._lives[name] = -abs(self._lives[name])

    def pause(self, name: str) -> None:
        """Keep what is done for a node until it wakes."""
        self._waiting.setdefault(name, [])

    def wake(self, name: str) -> None:
        """Do what was kept, in the order in which it came."""
        for call in self._waiting.pop(name, []):
            self.later(0.0, self._for(name, call))

    def life(self, name: str) -> int:
        """Which of its lives a node has, 0 if it is dead."""
        return max(0, self._lives.get(name, 0))

    def paused(self, name: str) -> bool:
        """Whether a node does nothing at present."""
        return name in self._waiting

    def tell(self, name: str, call: Call) -> None:
        """Do something for a node now."""
        self._for(name, call)()

    def after(self, name: str, delay_s: float, call: Call) -> None:
        """Do something for a node in ``delay_s`` seconds: its timer."""
        self.later(delay_s, self._for(name, call))

    def _for(self, name: str, call: Call) -> Call:
        life = self.life(name)

        def do() -> None:
            if not life or self.life(name) != life:
                return
            if name in self._waiting:
                self._waiting[name].append(call)
            else:
                call()

        return do
