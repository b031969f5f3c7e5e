"""Work of several users, of which some does not end."""

from __future__ import annotations

import threading
import time
from functools import partial

from opsd.collectors.nccl import MAX_OTHERS, UserThreads
from tests.fakes.clock import eventually


def test_what_ends_late_comes_later_and_holds_nobody_up() -> None:
    """The work of a user that has not ended is not begun again."""
    go, begun = threading.Event(), list[int]()

    def waits() -> str:
        begun.append(1)
        return "late" if go.wait(60) else "never"

    threads = UserThreads[str]("test")
    assert threads.run({1: waits, 2: lambda: "first"}, 0.1) == ["first"]
    assert threads.blocked == {1}
    assert threads.run({1: waits, 2: lambda: "second"}, 0.1) == ["second"]
    assert len(begun) == 1
    go.set()
    assert threads.run({}, 60) == ["late"]
    assert not threads.blocked


def test_an_error_of_one_users_work_is_no_others() -> None:
    """The results of the others are there, and the next work of the same user runs."""
    threads = UserThreads[int]("test")
    assert threads.run({1: partial(exit, 3), 2: lambda: 2}, 60) == [2]
    assert {user: type(error) for user, error in threads.failed.items()} == {1: SystemExit}
    assert threads.run({1: lambda: 4}, 60) == [4]
    assert not threads.failed


def test_user_ids_without_number_leave_threads_for_the_users_of_a_gpu() -> None:
    """The work of all of them hangs: each has a file system of its own that does not respond."""
    gate = threading.Event()
    threads = UserThreads[bool]("test")
    stuck = {user: partial(gate.wait, 60) for user in range(100_000, 100_100)}
    assert threads.run(stuck, 0.05, {1000}) == []
    assert len(threads.blocked) == MAX_OTHERS
    assert threads.run({**stuck, 1001: lambda: False}, 0.05, {1000}) == []
    assert eventually(lambda: threads.run({**stuck, 1000: lambda: True}, 0.05, {1000}) == [True])
    gate.set()


def test_processor_time_is_added_up() -> None:
    """It is that of the threads, not of who waits for them."""

    def busy() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    threads = UserThreads[None]("test")
    threads.run({1: busy, 2: busy}, 60)
    assert threads.taken_s >= 0.1
