"""Processor time that peers of the HTTP server have."""

from __future__ import annotations

from opsd.agent.web.admission import Budget
from tests.fakes.clock import FakeClock


def test_a_peer_has_some_time_at_once_and_then_a_share() -> None:
    """Who is in debt waits until a tenth of a core has paid it; others are not concerned."""
    clock = FakeClock()
    budget = Budget(2.0, 0.1, clock=clock.monotonic)
    budget.charge("a", 1.9)
    assert budget.affords("a")
    budget.charge("a", 1.1)
    assert [budget.affords(peer) for peer in "ab"] == [False, True]
    clock.advance(9.9)
    assert not budget.affords("a")
    clock.advance(0.2)
    assert budget.affords("a")


def test_it_remembers_a_bounded_number_of_peers() -> None:
    """A user may have thousands of user ids. Those who asked longest ago are forgotten first."""
    budget = Budget(1.0, 0.1, clock=FakeClock().monotonic)
    for number in range(Budget.MAX_PEERS + 1):
        budget.charge(f"uid {number}", 5.0)
    assert [budget.affords(f"uid {number}") for number in (0, 1, Budget.MAX_PEERS)] == [True, False, False]
