"""Threads that work for several peers in turn."""

from __future__ import annotations

import threading
import weakref

from opsd.agent.web.lanes import MAX_WAITING, Lane
from tests.fakes.clock import eventually


def test_peers_take_turns() -> None:
    """A peer with a hundred jobs delays another one's by one job."""
    lane, done, gate = Lane("test", 1, share=1), [], threading.Event()
    lane.submit("greedy", lambda: bool(gate.wait(20)))
    for number in range(100):
        lane.submit("greedy", lambda number=number: done.append(number))
    lane.submit("modest", lambda: done.append("modest"))
    gate.set()
    assert eventually(lambda: len(done) == 101)
    assert done.index("modest") <= 1
    lane.close()


def test_a_peer_does_not_get_all_threads() -> None:
    """One whose jobs do not end blocks its share of the threads; the others go on."""
    lane, ended, gate = Lane("test", 3, share=2), threading.Event(), threading.Event()
    for _ in range(5):
        lane.submit("stuck", lambda: bool(gate.wait(20)))
    lane.submit("other", ended.set)
    assert ended.wait(20)
    gate.set()
    lane.close()


def test_a_lane_that_is_stuck_keeps_nothing_that_nobody_waits_for() -> None:
    """Its one thread never returns, and clients come and go."""
    lane, gate, kept = Lane("test", 1, share=1), threading.Event(), weakref.WeakSet()
    lane.submit("stuck", lambda: bool(gate.wait(60)))

    class Connection:
        open = True

    for number in range(10 * MAX_WAITING):
        connection = Connection()
        kept.add(connection)
        lane.submit(f"10.0.0.{number % 200}", lambda: None, lambda connection=connection: connection.open)
        connection.open = False
    del connection
    assert len(kept) <= MAX_WAITING + 1
    gate.set()
    lane.close()
