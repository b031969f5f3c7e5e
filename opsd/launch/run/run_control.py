"""What the launcher's part that minds the ranks of this node asks of the part that decides about the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from opsd.launch.hangs.hang import Hang
from opsd.launch.io.control import Request
from opsd.launch.ranks.failure import Failure
from opsd.launch.ranks.ranks import Rank

RankFailure = tuple[Failure, Rank]
CONTROL = "control"
"""Who asks for a stop if it is not a signal."""


class RunControl(Protocol):
    """Decides about the run: what to do when something has happened on this node."""

    def start_run(self) -> None:
        """The launcher serves; bring about the first generation."""
        ...

    def cannot_start(self, reason: str) -> None:
        """The ranks of the generation could not all be started."""
        ...

    def failed(self, found: Sequence[RankFailure]) -> None:
        """Ranks of this node have failed, all that did at about the same time."""
        ...

    def hung(self, hang: Hang) -> None:
        """The ranks of this node have stood still for too long; told again for as long as they do."""
        ...

    def ended(self) -> None:
        """All ranks of this node have ended in good order: finished, or stopped as they were told to."""
        ...

    def asked_to_stop(self, by: str) -> None:
        """Somebody wants the run to checkpoint and stop; asked again, to hurry."""
        ...

    def stop_too_slow(self, reason: str) -> None:
        """Ranks that were asked to stop have not done so in time."""
        ...

    def interrupted(self) -> None:
        """SIGINT: end at once."""
        ...

    def request(self, request: Request) -> Request:
        """The answer to a request on the control socket other than ``stop``."""
        ...

    def close(self) -> None:
        """The launcher ends."""
        ...
