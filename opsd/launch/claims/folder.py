"""The run's folder for the state machine: looks, claims and the lease, in threads, since a file server may pause."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path

from opsd.checkpoints import claims
from opsd.checkpoints.claims import Claim
from opsd.launch.claims.looks import Look
from opsd.launch.io.loop import Loop

LASTING = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOTSUP, errno.ENOENT, errno.EISDIR, errno.EEXIST}
)
"""Errors that do not go away by themselves."""
SAY_S = 60.0


class RunFolder:
    """The ``Folder`` in ``path``. ``looked`` and ``claimed`` are the state machine's."""

    def __init__(
        self,
        path: Path,
        loop: Loop,
        looked: Callable[[Look | None], None],
        claimed: Callable[[bool | None], None],
        say: Callable[[str], None],
    ) -> None:
        self.error: OSError | None = None
        """Why the newest look, or the newest claim, has failed; None while all is well."""
        self.failing_since: float | None = None
        """Since when claims fail, on the monotonic clock; a folder that cannot be written may be read all the same."""
        self._claim_error: OSError | None = None
        self._path = path
        self._loop = loop
        self._looked = looked
        self._claimed = claimed
        self._say = say
        self._said_at = -SAY_S
        self._known = 0
        self._found: claims.Found | None = None
        self._place: tuple[int, int] | None = None
        self._tried = False

    def look(self, *, whole: bool) -> None:
        """See ``Folder.look``."""
        self._loop.run_in_thread(lambda: self._look(whole), self._answer)

    def _look(self, whole: bool) -> Look:
        if not self._tried:
            claims.try_primitive(self._path)
            self._tried = True
        known, place = self._known, _place(self._path)
        lease = claims.lease(self._path)
        if not whole and lease[0] <= known and place == self._place:
            return Look(lease, None, False)
        self._found = claims.newest_unless(self._path, self._found)
        claim = self._found.claim if self._found is not None else None
        self._recognise(place, claim.number if claim is not None else 0, known)
        return Look(lease, claim, True)

    def _recognise(self, place: tuple[int, int] | None, newest: int, known: int) -> None:
        """Raises OSError for what lies below a mount that is gone: there this side would claim what others have.

        The same folder without its claims has been emptied by somebody: that is the run's folder all the same.
        """
        if newest < known and place != self._place:
            why = f"{self._path} is another folder than before, without generation {known}: is it still mounted?"
            raise OSError(errno.ESTALE, why)
        self._known, self._place = max(self._known, newest), place

    def _answer(self, found: Look | OSError) -> None:
        self._note(found)
        self._looked(None if isinstance(found, OSError) else found)

    def claim(self, claim: Claim) -> None:
        """See ``Folder.claim``."""

        def make() -> bool:
            place = _place(self._path)
            if place != self._place:
                self._recognise(place, claims.newest_number(self._path), self._known)
            return claims.create(self._path, claim)

        def answered(mine: bool | OSError) -> None:
            self._claim_error = mine if isinstance(mine, OSError) else None
            since = time.monotonic() if self.failing_since is None else self.failing_since
            self.failing_since = since if self._claim_error is not None else None
            self._note(mine)
            if mine is True:
                self._known = max(self._known, claim.number)
            self._claimed(None if isinstance(mine, OSError) else mine)

        self._loop.run_in_thread(make, answered)

    def _note(self, outcome: object) -> None:
        """Say now and then what is wrong; not at the start, where the launcher ends of what will not go away."""
        self.error = outcome if isinstance(outcome, OSError) else self._claim_error
        now = time.monotonic()
        if self.error is not None and (self._tried or self.error.errno not in LASTING) and now - self._said_at >= SAY_S:
            self._said_at = now
            self._say(f"{self.error.strerror or self.error}; trying again")

    def renew(self, number: int, beat: int) -> None:
        """See ``Folder.renew``; left out while the one before is still under way."""
        self._loop.run_in_thread(lambda: claims.renew(self._path, number, beat), lambda _: None, key="lease")


def _place(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from another one with its name, None if there is none."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
