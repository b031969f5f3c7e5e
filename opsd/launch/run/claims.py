"""The head's claims of generations in the run's folder, and its look at whether another copy of the run has begun."""

from __future__ import annotations

from collections.abc import Callable

from opsd import exitcodes
from opsd.launch.claims.outside import Fence
from opsd.launch.io.aside import aside
from opsd.launch.io.loop import Loop
from opsd.launch.io.messages import say
from opsd.launch.run.head import Head

LOOK_S = 5.0
"""How often the head looks whether another copy of the run has begun."""
REFUSED = 3
"""So often in a row may a generation turn out to be somebody else's: a head that was cut off may have claimed it."""


class Claims:
    """Of one launcher. ``head`` is its part as the head while it is that, ``leave`` ends it."""

    def __init__(
        self, loop: Loop, fence: Fence, head: Callable[[], Head | None], leave: Callable[[int, str], None]
    ) -> None:
        self._loop = loop
        self._fence = fence
        self._head = head
        self._leave = leave
        self._refused = 0

    def claim(self, number: int, granted: Callable[[], None]) -> None:
        """Claim generation ``number`` of what this launcher leads; if it is somebody else's, another, or the end."""

        def answered(mine: bool | OSError) -> None:
            if isinstance(mine, OSError):
                say(f"generation {number} cannot be claimed in the run's folder: {mine.strerror or mine}")
                self._leave(exitcodes.FAILED, f"the run's folder cannot be written: {mine.strerror or mine}")
            elif mine:
                self._refused = 0
                granted()
            else:
                aside(self._loop, self._fence.overtaken, lambda overtaken: self._is_taken(number, overtaken))

        aside(self._loop, lambda: self._fence.claim(number), answered)

    def _is_taken(self, number: int, overtaken: bool | OSError) -> None:
        head = self._head()
        if head is not None and overtaken is True:
            head.overtaken()
        elif head is not None and self._refused < REFUSED:
            self._refused += 1
            head.claim_refused()
        else:
            self._leave(
                exitcodes.FAILED, f"another launcher of this run has claimed generation {number} or a later one"
            )

    def claim_tie(self, number: int, decide: Callable[[bool], None]) -> None:
        """Claim generation ``number`` for one of two halves; the other then cannot go on."""
        aside(self._loop, lambda: self._fence.claim(number), lambda mine: decide(mine is True))

    def watch(self) -> None:
        """Look from now on, while this launcher is the head, whether its run goes on elsewhere."""
        self._loop.later(LOOK_S, self._look)

    def _look(self) -> None:
        if self._head() is None:
            self.watch()
        else:
            aside(self._loop, self._fence.overtaken, self._looked)

    def _looked(self, overtaken: bool | OSError) -> None:
        head = self._head()
        if overtaken is True and head is not None:
            head.overtaken()
        self.watch()
