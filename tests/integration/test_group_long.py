"""Launchers in a world of virtual time, for a million events of random faults."""

from __future__ import annotations

import random

import pytest

from tests.fakes.invariants import FaultInjection

EVENTS = 1_000_000


@pytest.mark.long
def test_a_million_events_of_trouble() -> None:
    """Runs of one to eight launchers, five to sixty faults each: none has two sides, ends for nothing, or stands still.

    An episode that fails is told by its seed.
    """
    seed = events = 0
    while events < EVENTS:
        pick = random.Random(seed)
        launchers = pick.randrange(1, 9)
        least = pick.randrange(1, launchers + 1)
        trouble = FaultInjection(seed, launchers, least, pick.randrange(least, launchers + 1))
        try:
            trouble.go(pick.randrange(5, 60))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        events += trouble.world.events
        seed += 1
