"""Threads: work beside the training, and for several peers in turn."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from opsd.threads import LIMIT, MAX_WAITING, Background, Deadlines, FairQueue
from tests.fakes.clock import eventually

# What is done beside the training: in order, soon, and never for long in its way.


class Storage:
    """Takes numbers, unless it pauses."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.answers = threading.Event()

    def take(self, number: int) -> None:
        self.answers.wait()
        self.taken.append(number)


def test_what_pauses_holds_nobody_up_and_is_done_in_order() -> None:
    """What does not fit any more is dropped."""
    storage, background = Storage(), Background()
    began = time.monotonic()
    for number in range(LIMIT + 100):
        background.run(lambda number=number: storage.take(number))
    assert not background.finish(0)
    assert time.monotonic() - began < 20  # and not a wait for each
    storage.answers.set()
    assert background.finish()
    assert storage.taken[:LIMIT] == list(range(LIMIT))
    assert len(storage.taken) <= LIMIT + 1  # the one in hand waits no more


def test_what_fails_does_not_end_it(capfd: pytest.CaptureFixture[str]) -> None:
    """The failure is printed, and what comes next is done."""
    storage, background = Storage(), Background()
    storage.answers.set()
    background.run(lambda: storage.taken.index(5))
    background.run(lambda: storage.take(1))
    assert background.finish()
    assert storage.taken == [1]
    assert "5 is not in list" in capfd.readouterr().err


# Threads that work for several peers in turn.


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """No thread can be started, as when a user has all that the system has to give: none has so large a stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_peers_take_turns() -> None:
    """A peer with a hundred jobs delays another one's by one job."""
    queue, done, gate = FairQueue("test", 1, share=1), [], threading.Event()
    queue.submit("greedy", lambda: bool(gate.wait(20)))
    for number in range(100):
        queue.submit("greedy", lambda number=number: done.append(number))
    queue.submit("modest", lambda: done.append("modest"))
    gate.set()
    assert eventually(lambda: len(done) == 101)
    assert done.index("modest") <= 1
    queue.close()


def test_a_peer_does_not_get_all_threads() -> None:
    """One whose jobs do not end blocks its share of the threads; the others go on."""
    queue, ended, gate = FairQueue("test", 3, share=2), threading.Event(), threading.Event()
    for _ in range(5):
        queue.submit("stuck", lambda: bool(gate.wait(20)))
    queue.submit("other", ended.set)
    assert ended.wait(20)
    gate.set()
    queue.close()


def test_a_lane_that_is_stuck_keeps_nothing_that_nobody_waits_for() -> None:
    """Its one thread never returns, and clients come and go."""
    queue, gate, kept = FairQueue("test", 1, share=1), threading.Event(), weakref.WeakSet()
    queue.submit("stuck", lambda: bool(gate.wait(60)))

    class Connection:
        open = True

    for number in range(10 * MAX_WAITING):
        connection = Connection()
        kept.add(connection)
        queue.submit(f"10.0.0.{number % 200}", lambda: None, lambda connection=connection: connection.open)
        connection.open = False
    del connection
    assert len(kept) <= MAX_WAITING + 1
    gate.set()
    queue.close()


def test_a_peer_has_so_much_room() -> None:
    """What is too much is refused; another peer has room of its own. At the end what waits may still be done."""
    queue, gate, begun, done = FairQueue("room", 2, share=1, room=2), threading.Event(), threading.Event(), list[int]()

    def first() -> None:
        begun.set()
        gate.wait(60)

    assert queue.submit("greedy", first)
    assert begun.wait(60)
    assert [queue.submit("greedy", lambda number=number: done.append(number)) for number in range(3)] == [1, 1, 0]
    assert queue.submit("modest", lambda: done.append(9))
    queue.close(finish=True)
    gate.set()
    assert eventually(lambda: sorted(done) == [0, 1, 9])
    assert eventually(lambda: not any(thread.name.startswith("room-") for thread in threading.enumerate()))


def test_a_lane_outlives_a_lack_of_threads() -> None:
    """What was submitted then is done with the next job."""
    queue, done = FairQueue("test", 2, share=1), list[int]()
    with without_threads():
        queue.submit("peer", lambda: done.append(1))
    queue.submit("peer", lambda: done.append(2))
    assert eventually(lambda: done == [1, 2])
    queue.close()


def test_functions_are_called_at_their_time() -> None:
    """In its order, also after a pause and a lack of threads; nothing is early."""
    deadlines, called, began = Deadlines(), list[str](), time.monotonic()
    with without_threads():
        deadlines.after(0.0, lambda: called.append("first"))
    deadlines.after(0.1, lambda: called.append("third"))
    deadlines.after(0.05, lambda: called.append("second"))
    assert eventually(lambda: called == ["first", "second", "third"])
    assert time.monotonic() - began >= 0.1
    deadlines.after(0.0, lambda: called.append("fourth"))
    assert eventually(lambda: called[3:] == ["fourth"])
