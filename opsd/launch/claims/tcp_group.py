"""The group over TCP and the run's folder, in the launcher's loop; a single launcher uses no network."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from opsd.checkpoints import claims
from opsd.checkpoints.claims import Claim
from opsd.launch.claims.claim_store import Plan, StoreRead
from opsd.launch.claims.election import INITIAL_TARGETS
from opsd.launch.claims.generation_state import TIMEOUT_S
from opsd.launch.claims.group import Group
from opsd.launch.claims.messages import MESSAGES, GroupListener, Message
from opsd.launch.io.handshake import Identity
from opsd.launch.io.loop import Loop
from opsd.launch.io.protocol import Codec, Member
from opsd.launch.io.reporting import print_message as print_message
from opsd.launch.io.transport import Transport, raise_descriptor_limit
from opsd.words import of_file

TICK_S = 0.05
ALONE_TICK_S = 0.25
FEW = 64
"""With more launchers than this, ticks are half as frequent."""
LASTING = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOTSUP, errno.ENOENT, errno.EISDIR, errno.EEXIST}
)
"""Errors of the folder that do not go away by themselves."""
REPORT_INTERVAL_S = 60.0
_CODEC = Codec(MESSAGES)


class TcpGroup(Group):
    """Arguments as for ``GenerationState``. A launcher that the others have not ``expected`` may join later."""

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
        replaces: int | None = None,
        timeout_s: float = TIMEOUT_S,
        print_message: Callable[[str], None] = print_message,
    ) -> None:
        self._loop = loop
        self._left = False
        self._alone = len(expected) == 1
        self._encoded: tuple[Message | None, dict[str, Any]] = (None, {})
        self._transport = Transport(
            Identity(own, start, secret), loop, print_message=print_message,
            received=self._decode, unreachable=partial(self._unless_left, self.unreachable),
            superseded=partial(self._unless_left, self.superseded), launchers=lambda: self.member_count,
        )  # fmt: skip
        super().__init__(
            own, expected, self._encode,
            FolderClaimStore(
                folder, loop, partial(self._unless_left, self.store_read), partial(self._unless_left, self.claimed),
                print_message,
            ),
            partial(loop.later, 0.0, self.flush),
            start=start, launcher=launcher, size=size, once=once, replaces=replaces,
            timeout_s=timeout_s, now=time.monotonic(),
        )  # fmt: skip

    def start(self, listener: GroupListener) -> None:
        """As for ``Group``, and listen. Raises OSError if the port is taken."""
        super().start(listener)
        few = len(self.members) <= FEW
        if not self._alone:
            raise_descriptor_limit(len(self.members))
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

    def _prepare(self, plan: Plan) -> None:
        super()._prepare(plan)
        if not self._alone:  # without this leader, those are asked first
            first = map(plan.member, plan.slots[: INITIAL_TARGETS + 1])
            self._transport.look_up(one for one in first if one is not None and one.name != self.own.name)

    def _unless_left(self, call: Callable[..., None], *args: Any) -> None:
        if not self._left:
            call(time.monotonic(), *args)

    def _encode(self, member: Member, message: Message) -> None:
        """Encodes a message to several members once."""
        if self._encoded[0] is not message:
            self._encoded = (message, _CODEC.encode(message))
        self._transport.send(member, self._encoded[1])

    def _decode(self, sender: Member, raw: dict[str, Any]) -> None:
        self._unless_left(self.receive, sender, _CODEC.decode(raw))


class FolderClaimStore:
    """The ``ClaimStore`` in ``path``, used from threads, since a file server may pause.

    ``store_read`` and ``claimed`` are the group's.
    """

    def __init__(
        self,
        path: Path,
        loop: Loop,
        store_read: Callable[[StoreRead | None], None],
        claimed: Callable[[bool | None], None],
        print_message: Callable[[str], None],
    ) -> None:
        self.error: OSError | None = None
        self._claim_error: OSError | None = None
        self._path = path
        self._loop = loop
        self._store_read = store_read
        self._claimed = claimed
        self._print_message = print_message
        self._said_at = -REPORT_INTERVAL_S
        self._known = 0
        self._found: claims.Found | None = None
        self._told: claims.Found | None = None
        self._identity: tuple[int, int] | None = None
        self._tried = False

    def read(self, *, full: bool) -> None:
        self._loop.run_in_thread(partial(self._read, full), self._answer)

    def _read(self, full: bool) -> StoreRead:
        if not self._tried:
            claims.try_primitive(self._path)
            self._tried = True
        known, identity = self._known, _identity(self._path)
        lease = claims.lease(self._path)
        if not full and lease[0] <= known and identity == self._identity:
            return StoreRead(lease, None, False)
        found, told = self._found, self._told
        newer = told is not None and (found is None or told.claim.number > found.claim.number)
        self._found = claims.newest_unless(self._path, told if newer else found)
        read = StoreRead(lease, self._found.claim if self._found is not None else None, True)
        self._check_identity(identity, read.number, known)
        return read

    def _check_identity(self, identity: tuple[int, int] | None, newest: int, known: int) -> None:
        """Raises OSError if the folder is not the one used before and lacks its claims: the file system was unmounted.

        Claims made there would collide with those of other nodes. The same folder emptied by somebody is accepted.
        """
        if newest < known and identity != self._identity:
            why = f"{self._path} is another folder than before, without generation {known}: is it still mounted?"
            raise OSError(errno.ESTALE, why)
        self._known, self._identity = max(self._known, newest), identity

    def told(self, claim: Claim) -> None:
        self._told = claims.Found(claim, None)

    def _answer(self, found: StoreRead | OSError) -> None:
        self._note(found)
        self._store_read(None if isinstance(found, OSError) else found)

    def claim(self, claim: Claim) -> None:
        self._loop.run_in_thread(partial(self._make, claim), partial(self._made, claim.number))

    def _make(self, claim: Claim) -> bool:
        identity = _identity(self._path)
        if identity != self._identity:
            self._check_identity(identity, claims.newest_number(self._path), self._known)
        return claims.create(self._path, claim)

    def _made(self, number: int, mine: bool | OSError) -> None:
        self._claim_error = mine if isinstance(mine, OSError) else None
        self._note(mine)
        if mine is True:
            self._known = max(self._known, number)
        self._claimed(None if isinstance(mine, OSError) else mine)

    def _note(self, outcome: object) -> None:
        """Report an error now and then; not at startup, where the launcher exits on a lasting one."""
        self.error = outcome if isinstance(outcome, OSError) else self._claim_error
        now = time.monotonic()
        if (
            self.error is not None
            and (self._tried or self.error.errno not in LASTING)
            and now - self._said_at >= REPORT_INTERVAL_S
        ):
            self._said_at = now
            self._print_message(f"{of_file(self.error)}; trying again")

    def renew(self, number: int, beat: int) -> None:
        """See ``ClaimStore.renew``; skipped while the previous renewal is in flight."""
        self._loop.run_in_thread(partial(claims.renew, self._path, number, beat), _ignore, key="lease")


def _ignore(outcome: object) -> None:
    """The next renewal makes up for one that failed."""


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode of the folder, None if it does not exist."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
