"""Waits for what else has failed when a rank has: the first to be noticed need not be the first cause."""

from __future__ import annotations

from collections.abc import Callable

from opsd.launch.io.loop import Loop, Timer
from opsd.launch.ranks.postmortem import failures
from opsd.launch.ranks.ranks import Generation

GATHER_S = 0.02
"""After a failure that is clearly a first cause: time for the other ranks' exits, for the record."""
GATHER_VICTIM_S = 1.0
"""After an exit that looks like the consequence of another: time for that other to show."""
LOOK_S = 0.05


class Gathering:
    """Calls ``settled`` once the failures of this node that matter should have shown."""

    def __init__(self, loop: Loop, settled: Callable[[], None]) -> None:
        self._loop = loop
        self._settled = settled
        self._timer: Timer | None = None
        self._looking: Timer | None = None

    @property
    def open(self) -> bool:
        """True while it waits."""
        return self._timer is not None

    def note(self, generation: Generation) -> None:
        """A rank has failed, or has said that it is failing."""
        clear = _has_first_cause(generation)
        if self._timer is None:
            self._timer = self._loop.later(GATHER_S if clear else GATHER_VICTIM_S, self._settle)
            if not clear:
                self._look_again(generation)
        elif clear or not generation.running:
            self._timer.cancel()
            self._timer = self._loop.later(0.0, self._settle)

    def _look_again(self, generation: Generation) -> None:
        self._looking = self._loop.later(LOOK_S, lambda: self._look(generation))

    def _look(self, generation: Generation) -> None:
        """See whether the rank that was first has left its error by now, though it may take long to end."""
        if _has_first_cause(generation):
            self.note(generation)
        else:
            self._look_again(generation)

    def _settle(self) -> None:
        self.forget()
        self._settled()

    def forget(self) -> None:
        """What has failed is known, or no longer matters."""
        for timer in (self._timer, self._looking):
            if timer is not None:
                timer.cancel()
        self._timer = self._looking = None


def _has_first_cause(generation: Generation) -> bool:
    return any(failure.kind != "communication" for failure, _ in failures(generation))
