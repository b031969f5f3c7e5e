"""What one launcher has to say to the others, and the calls that its listener gets, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from opsd.launch.io.member import Member, Message
from opsd.launch.quorum.port import Listener


class Outlet:
    """The way out of the state machine. ``send`` may lose messages.

    Calls of the listener wait for ``flush``, so that it finds the state machine at rest and may ask it for more.
    """

    def __init__(self, send: Callable[[Member, Message], None]) -> None:
        self.send = send
        self.term = 0
        """The newest that this launcher knows of; it goes with every message."""
        self._listener: Listener | None = None
        self._calls: deque[Callable[[Listener], None]] = deque()
        self._flushing = False

    def message(self, kind: str, **fields: Any) -> Message:
        """A message of this term."""
        return {"kind": kind, "term": self.term, **fields}

    def post(self, member: Member, kind: str, **fields: Any) -> None:
        """Send a message of this term."""
        self.send(member, self.message(kind, **fields))

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` from now on."""
        self._listener = listener

    def call(self, call: Callable[[Listener], None]) -> None:
        """Have the listener called by the next ``flush``."""
        self._calls.append(call)

    def flush(self) -> None:
        """Make the calls that are due; those that come up meanwhile are made by the outermost."""
        if self._flushing or self._listener is None:
            return
        self._flushing = True
        try:
            while self._calls:
                self._calls.popleft()(self._listener)
        finally:
            self._flushing = False
