"""How much a launcher may say."""

from __future__ import annotations

import pytest

from opsd.launch.io.connection import BYTES_PER_S, MESSAGES_PER_S, PATIENCE_S, RateLimit
from opsd.launch.io.handshake import WireError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_said_for_good_has_a_limit_and_a_burst_has_a_greater_one() -> None:
    """What was kept for a launcher that was stopped may come at once; somebody who goes on like that is cut."""
    clock = Clock()
    rate_limit = RateLimit(clock)
    rate_limit.spend(int(MESSAGES_PER_S * PATIENCE_S), 0)
    with pytest.raises(WireError, match="says more than 1000 messages or 16 MB a second"):
        rate_limit.spend(1, 0)
    for _ in range(100):
        clock.now += 0.1
        rate_limit.spend(int(MESSAGES_PER_S * 0.1) - 1, int(BYTES_PER_S * 0.1))


def test_few_large_messages_count_as_well() -> None:
    """By their bytes."""
    rate_limit = RateLimit(Clock())
    with pytest.raises(WireError):
        for _ in range(1000):
            rate_limit.spend(1, 8 << 20)
