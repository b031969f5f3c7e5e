"""How much a launcher may say, so that one that has gone wild does not keep this one from the others."""

from __future__ import annotations

import time
from collections.abc import Callable

from opsd.launch.io.wire import WireError

MESSAGES_PER_S, BYTES_PER_S = 1_000.0, 16e6
"""What a launcher may say for good; it says some twenty messages a second."""
PATIENCE_S = 30.0
"""What a launcher was sent while it was stopped, it reads at once: that is held against nobody."""


class Allowance:
    """Grows with time up to what may be said within ``PATIENCE_S``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._messages = MESSAGES_PER_S * PATIENCE_S
        self._bytes = BYTES_PER_S * PATIENCE_S

    def spend(self, messages: int, size: int) -> None:
        """Take what was said, ``size`` in bytes. Raises WireError once there is nothing left."""
        now = self._clock()
        passed, self._at = now - self._at, now
        self._messages = min(self._messages + passed * MESSAGES_PER_S, MESSAGES_PER_S * PATIENCE_S) - messages
        self._bytes = min(self._bytes + passed * BYTES_PER_S, BYTES_PER_S * PATIENCE_S) - size
        if min(self._messages, self._bytes) < 0:
            self._messages, self._bytes = max(self._messages, 0.0), max(self._bytes, 0.0)
            raise WireError(f"it says more than {MESSAGES_PER_S:.0f} messages or {BYTES_PER_S / 1e6:.0f} MB a second")
