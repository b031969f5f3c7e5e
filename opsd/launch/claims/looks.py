"""One launcher's looks at the run's folder: how fresh what it knows is, and whether somebody still renews the lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opsd.checkpoints.claims import Claim
from opsd.launch.claims.port import Folder

LOOK_S = 1.0
AGAIN_S = 0.2
"""After a look that failed, or came back with less than is known."""
MANY = 64
"""With more launchers the whole folder is read more rarely; the lease names the newest generation as well."""
GAP_S = 3.0
"""If answers were further apart than this nothing can be said of the lease in between."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was found: the lease, and the newest claim unless only the lease was read."""

    lease: tuple[int, int]
    claim: Claim | None
    whole: bool


class Looks:
    """``folder`` is asked once a second, and when somebody wants to know. One look is under way at a time."""

    def __init__(self, folder: Folder, now: float) -> None:
        self.last = now
        """When the folder answered last."""
        self._folder = folder
        self._flying = False
        self._due = self._whole_due = now
        self._flying_for: list[Callable[[], None]] = []
        self._wanted: list[Callable[[], None]] = []
        self._beat = (0, 0)
        self._moved = now

    def want(self, now: float, then: Callable[[], None] | None = None) -> None:
        """Look at once; ``then`` is called after a look that has begun from now on, and found nothing newer."""
        if then is not None:
            self._wanted.append(then)
        self._due = self._whole_due = now
        self._go(now, whole=True)

    def forget(self) -> None:
        """What was to be done after a look is not to be done any more."""
        self._flying_for, self._wanted = [], []

    def tick(self, now: float, launchers: int) -> None:
        """Look if it is time."""
        if now < self._due or self._flying:
            return
        whole = bool(self._wanted) or now >= self._whole_due
        self._due = now + LOOK_S * max(1.0, launchers / (4 * MANY))
        if whole:
            self._whole_due = now + LOOK_S * max(1.0, launchers / MANY)
        self._go(now, whole=whole)

    def _go(self, now: float, *, whole: bool) -> None:
        if self._flying:
            return
        self._flying = True
        self._due = max(self._due, now + LOOK_S)
        if whole:
            self._whole_due = max(self._whole_due, self._due)
            self._flying_for, self._wanted = self._wanted, []
        self._folder.look(whole=whole)

    def answered(self, now: float, found: Look | None, known: int) -> None:
        """A look has come back, None if it failed; ``known`` is the newest number that is known."""
        self._flying = False
        if found is None or (found.whole and (found.claim.number if found.claim else 0) < known):
            self._wanted = self._flying_for + self._wanted
            self._flying_for = []
            self._due = self._whole_due = now + AGAIN_S
        elif self._wanted:
            self._due = self._whole_due = now
        if found is not None:
            self._note_lease(now, found.lease, known)
            self.last = now

    def done(self) -> None:
        """The look that came back has shown nothing newer: do what waited for that."""
        waiting, self._flying_for = self._flying_for, []
        for then in waiting:
            then()

    def _note_lease(self, now: float, lease: tuple[int, int], known: int) -> None:
        if now - self.last > GAP_S or (lease != self._beat and lease[0] >= known):
            self._moved = now
        self._beat = lease

    def renewed(self, now: float) -> None:
        """Somebody has just begun to lead."""
        self._moved = now

    def lease_idle_s(self, now: float) -> float:
        """For how long looks have shown that nobody renews the lease; 0 while that cannot be seen."""
        return self.last - self._moved if now - self.last < GAP_S else 0.0
