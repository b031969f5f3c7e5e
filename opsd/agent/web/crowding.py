"""Which connections are closed when there are too many, or too much waits in them to be sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opsd.agent.web.connection import Connection, Stage


def oldest(connections: Iterable[Connection]) -> Connection:
    """The one to close first: a client that is there for an answer sends its request at once."""
    return min(connections, key=lambda c: (c.stage is not Stage.READING, c.opened_at))


def too_much(connections: Iterable[Connection], body: bytes, limit: int) -> Sequence[Connection]:
    """Those to close so that ``body`` and what is unsent are ``limit`` bytes at most, of the peers that left most.

    An answer that several wait for is there once.
    """
    writing = [c for c in connections if c.stage is Stage.WRITING]
    closed: list[Connection] = []
    while writing and _size([body, *(c.unsent for c in writing)]) > limit:
        peers = {c.peer for c in writing}
        most = max(peers, key=lambda peer: _size(c.unsent for c in writing if c.peer == peer))
        late = oldest(c for c in writing if c.peer == most)
        writing.remove(late)
        closed.append(late)
    return closed


def _size(bodies: Iterable[bytes]) -> int:
    """Bytes of ``bodies``, the same one counted once."""
    return sum({id(body): len(body) for body in bodies}.values())
