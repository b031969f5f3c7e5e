"""Progress without a terminal is a line now and then, and none of work that ends soon."""

from __future__ import annotations

import pytest

from opsd.progress import PLAIN_S, Lines, shown, tracked


def test_lines_have_share_and_time_left() -> None:
    """One every few seconds; without a total only what is done."""
    said: list[str] = []
    now = 0.0
    look = Lines("staging", "bytes", said.append, lambda: now)
    look(1_000_000_000, 4_000_000_000)
    now = PLAIN_S
    look(1_000_000_000, 4_000_000_000)
    look(1_000_000_001, 4_000_000_000)
    now = 2 * PLAIN_S
    look(4_000_000_000, 4_000_000_000)
    assert said == [
        "opsd: staging: 1.00 GB of 4.00 GB (25%), 15.0 s left",
        "opsd: staging: 4.00 GB of 4.00 GB (100%)",
    ]
    texts = Lines("evaluating wiki", "texts", said.append, lambda: now)
    now += PLAIN_S
    texts(1234, None)
    assert said[-1] == "opsd: evaluating wiki: 1,234 texts"


def test_work_that_ends_soon_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither a line nor control characters."""
    assert list(tracked(range(3), "evaluating", "items", 3)) == [0, 1, 2]
    with shown("tokenising") as look:
        look(1, 2)
    assert capfd.readouterr() == ("", "")
