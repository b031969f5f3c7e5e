"""What the matrix of faults fails for."""

from __future__ import annotations

import pytest

from tests.fakes.partition import Trace, check_commits, check_steps


def trace(generation: int, first: float, last: float, *commits: float) -> Trace:
    return Trace(generation, 0, 1, "n1", (first, last), commits)


def test_two_generations_at_once_are_seen() -> None:
    """From the end of the fault, or from when the second began, for a few seconds only."""
    check_steps([trace(1, 0.0, 10.0), trace(2, 9.0, 20.0)], healed_at=5.0)
    check_steps([trace(1, 0.0, 10.0), trace(2, 3.0, 20.0)], healed_at=9.0)
    with pytest.raises(AssertionError, match=r"1 and 2 both stepped, for 7\.0 s after healing"):
        check_steps([trace(1, 0.0, 10.0), trace(2, 3.0, 20.0)], healed_at=2.0)
    with pytest.raises(AssertionError, match=r"1 and 2 both stepped, for 5\.0 s after healing"):
        check_steps([trace(1, 0.0, 10.0), trace(2, 3.0, 20.0), trace(3, 21.0, 22.0)], healed_at=5.0)


def test_a_commit_after_a_later_claim_is_seen() -> None:
    """Whatever the fault: the fence does not depend on the network."""
    traces = [trace(1, 0.0, 10.0, 1.0, 5.0), trace(2, 6.0, 20.0, 19.0)]
    check_commits(traces, {1: (0.0, 0), 2: (4.5, 0)})
    with pytest.raises(AssertionError, match=r"generation 1 committed 2\.0 s after a later one was claimed"):
        check_commits(traces, {1: (0.0, 0), 2: (3.0, 0)})
    with pytest.raises(AssertionError, match=r"generation 2 committed"):
        check_commits(traces, {1: (0.0, 0), 2: (4.5, 0), 3: (17.0, 0)})
    check_commits(traces, {1: (0.0, 0), 2: (4.5, 0), 3: (17.0, 2)})  # its ranks run on
