"""When a run that goes on with fewer nodes than it may takes in spares that have come."""

from __future__ import annotations

from collections.abc import Callable

from opsd.launch.run.nodes import GenerationPlanner, RunShape


class Growth:
    """Calls ``grow`` after a checkpoint, once the run has missed as much for want of ready spares as a restart costs.

    What was missed is in seconds of the grown run, the cost is ``shape.grow_s``, 0 for never. This is the ski-rental
    rule: waiting and restart together cost at most twice what the better choice would have, whenever the next restart
    comes, and a spare that comes and goes brings no more restarts than that. Right after a checkpoint hardly a step is
    lost, also with a program that cannot stop in good order. A restart for another reason takes the spares in, too.
    """

    def __init__(
        self, shape: RunShape, planner: GenerationPlanner, clock: Callable[[], float], grow: Callable[[], None]
    ) -> None:
        self._shape = shape
        self._planner = planner
        self._clock = clock
        self._grow = grow
        self._missed_s = self._share = self._since = 0.0

    def look(self) -> None:
        """Nodes have come, gone, or got ranks."""
        now = self._clock()
        self._missed_s += self._share * (now - self._since)
        self._since, self._share = now, self._missing()

    def saved(self) -> None:
        """Another checkpoint is durable."""
        self.look()
        if self._share and self._missed_s >= self._shape.grow_s > 0:
            self._grow()

    def _missing(self) -> float:
        """The share of the grown run's speed that the run lacks now."""
        planner, slots = self._planner, len(self._planner.slots)
        if not 0 < slots < self._shape.most or planner.changing or planner.waiting:
            return 0.0
        more = min(len(planner.spares), self._shape.most - slots)
        return more / (slots + more)

    def forget(self) -> None:
        """Another generation is proposed."""
        self._missed_s = self._share = 0.0
