"""Work of several users, of which some does not end."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from opsd.collectors.lib.user_threads import UserThreads


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


def test_an_error_of_the_work_is_raised_and_forgotten() -> None:
    """The next work of the same user runs."""
    threads = UserThreads[int]("test")
    with pytest.raises(SystemExit):
        threads.run({1: partial(exit, 3)}, 60)
    assert threads.run({1: lambda: 4}, 60) == [4]


def test_processor_time_is_added_up() -> None:
    """It is that of the threads, not of who waits for them."""

    def busy() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    threads = UserThreads[None]("test")
    threads.run({1: busy, 2: busy}, 60)
    assert threads.taken_s >= 0.1
