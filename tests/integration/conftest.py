"""What the tests with real parts share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_rank_outlives_its_test() -> Iterator[None]:
    """Ranks that a failed test has left behind would slow down all tests after it."""
    yield
    for process in multiprocessing.active_children():
        if process.name.startswith("trainer rank"):
            process.kill()
            process.join()
