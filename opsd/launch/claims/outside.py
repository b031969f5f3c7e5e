"""What a launcher with fellows asks of the world outside of their agreement."""

from __future__ import annotations

from typing import Protocol


class Fence(Protocol):
    """What makes sure, outside of the launchers, that a generation is only one. May block; is called in a thread."""

    def claim(self, number: int) -> bool:
        """True if generation ``number`` is this launcher's to begin, now and for good. Raises OSError."""
        ...

    def overtaken(self) -> bool:
        """True if another copy of the run has begun after this one. Raises OSError if that cannot be seen."""
        ...


class WatchedFence(Protocol):
    """The same for a launcher without fellows, which is told when anybody at all has gone past it."""

    def claim(self, number: int) -> bool:
        """See ``Fence.claim``."""
        ...

    def check(self, number: int) -> None:
        """Raises lease.Fenced if a generation after ``number`` is another launcher's, OSError if that is not known."""
        ...


class Job(Protocol):
    """The job that the run is part of, as far as its end goes. May block; is called in a thread."""

    def end(self, code: int, lost: tuple[str, ...], unfit: tuple[str, ...]) -> None:
        """The run has ended with the exit code ``code``, without the nodes ``lost``; ``unfit`` ones are to be avoided.

        May not return, because it ends the job.
        """
        ...
