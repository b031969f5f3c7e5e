"""The group over TCP and in the run's folder, in the launcher's loop; a launcher that is alone in it has no network."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from opsd.checkpoints import claims
from opsd.checkpoints.claims import Claim
from opsd.launch.claims.authority import Look
from opsd.launch.claims.claimant import TIMEOUT_S
from opsd.launch.claims.group import Group
from opsd.launch.claims.messages import MESSAGES, Listener, Message
from opsd.launch.io.handshake import Identity
from opsd.launch.io.loop import Loop
from opsd.launch.io.protocol import Codec, Member
from opsd.launch.io.reporting import say as say_to_user
from opsd.launch.io.strangers import ask_for_descriptors
from opsd.launch.io.transport import Transport

TICK_S = 0.05
ALONE_TICK_S = 0.25
FEW = 64
"""With more launchers than this, ticks are twice as long."""
LASTING = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOTSUP, errno.ENOENT, errno.EISDIR, errno.EEXIST}
)
"""Errors of the folder that do not go away by themselves."""
SAY_S = 60.0
_CODEC = Codec(MESSAGES)


class TcpGroup(Group):
    """Arguments are as for ``Claimant``. A launcher that is not among the ``expected`` of the others comes later."""

    def __init__(
        self,
        own: Member,
        expected: Sequence[Member],
        folder: Path,
        loop: Loop,
        *,
        start: str,
        launcher: str,
        secret: bytes,
        size: int,
        once: bool = False,
        timeout_s: float = TIMEOUT_S,
        say: Callable[[str], None] = say_to_user,
    ) -> None:
        self._loop = loop
        self._left = False
        self._alone = len(expected) == 1
        self._encoded: tuple[Message | None, dict[str, Any]] = (None, {})
        self._transport = Transport(
            Identity(own, start, secret), loop, say=say,
            received=self._decode, unreachable=partial(self._unless_left, self.unreachable),
            superseded=partial(self._unless_left, self.superseded), launchers=lambda: len(self.roster),
        )  # fmt: skip
        super().__init__(
            own, expected, self._encode,
            RunFolder(
                folder, loop, partial(self._unless_left, self.looked), partial(self._unless_left, self.claimed), say
            ),
            partial(loop.later, 0.0, self.flush),
            start=start, launcher=launcher, size=size, once=once, timeout_s=timeout_s, now=time.monotonic(),
        )  # fmt: skip

    def start(self, listener: Listener) -> None:
        """As for ``Group``, and listen. Raises OSError if the port cannot be had."""
        super().start(listener)
        few = len(self.roster) <= FEW
        if not self._alone:
            ask_for_descriptors(len(self.roster))
            self._transport.listen()
        tick = partial(self._unless_left, self.tick)
        self._loop.every(ALONE_TICK_S if self._alone else TICK_S if few else 2 * TICK_S, tick)
        tick()

    def leave(self) -> None:
        """As for ``Group``, and stop listening."""
        if not self._left:
            self._left = True
            super().leave()
            self._transport.close()

    def _unless_left(self, call: Callable[..., None], *args: Any) -> None:
        if not self._left:
            call(time.monotonic(), *args)

    def _encode(self, member: Member, message: Message) -> None:
        """What is said to many is encoded once."""
        if self._encoded[0] is not message:
            self._encoded = (message, _CODEC.encode(message))
        self._transport.send(member, self._encoded[1])

    def _decode(self, sender: Member, raw: dict[str, Any]) -> None:
        self._unless_left(self.receive, sender, _CODEC.decode(raw))


class RunFolder:
    """The ``Folder`` in ``path``, asked in threads, since a file server may pause.

    ``looked`` and ``claimed`` are the group's.
    """

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
        self._loop.run_in_thread(partial(self._look, whole), self._answer)

    def _look(self, whole: bool) -> Look:
        if not self._tried:
            claims.try_primitive(self._path)
            self._tried = True
        known, place = self._known, _place(self._path)
        lease = claims.lease(self._path)
        if not whole and lease[0] <= known and place == self._place:
            return Look(lease, None, False)
        self._found = claims.newest_unless(self._path, self._found)
        found = Look(lease, self._found.claim if self._found is not None else None, True)
        self._recognise(place, found.number, known)
        return found

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
        self._loop.run_in_thread(partial(self._make, claim), partial(self._made, claim.number))

    def _make(self, claim: Claim) -> bool:
        place = _place(self._path)
        if place != self._place:
            self._recognise(place, claims.newest_number(self._path), self._known)
        return claims.create(self._path, claim)

    def _made(self, number: int, mine: bool | OSError) -> None:
        self._claim_error = mine if isinstance(mine, OSError) else None
        self._note(mine)
        if mine is True:
            self._known = max(self._known, number)
        self._claimed(None if isinstance(mine, OSError) else mine)

    def _note(self, outcome: object) -> None:
        """Say now and then what is wrong; not at the start, where the launcher ends of what will not go away."""
        self.error = outcome if isinstance(outcome, OSError) else self._claim_error
        now = time.monotonic()
        if self.error is not None and (self._tried or self.error.errno not in LASTING) and now - self._said_at >= SAY_S:
            self._said_at = now
            self._say(f"{self.error.strerror or self.error}; trying again")

    def renew(self, number: int, beat: int) -> None:
        """See ``Folder.renew``; left out while the one before is still under way."""
        self._loop.run_in_thread(partial(claims.renew, self._path, number, beat), _ignore, key="lease")


def _ignore(outcome: object) -> None:
    """A lease that was not renewed is renewed the next time."""


def _place(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from another one with its name, None if there is none."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
