"""Work beside the launcher's loop: it never fails for want of descriptors, and what hangs does not pile up."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.launch.io.loop import Loop


@pytest.fixture
def loop() -> Loop:
    """A loop that gives up after a while."""
    loop = Loop()
    loop.later(20.0, loop.stop)
    return loop


@pytest.fixture
def no_descriptors(loop: Loop) -> Iterator[None]:
    """Not one descriptor can be had."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_it_returns_comes_from_the_loop(loop: Loop) -> None:
    """In the thread of the loop, and not in that of the work."""
    found: list[object] = []

    def done(result: int | OSError) -> None:
        found.extend((result, threading.current_thread()))
        loop.stop()

    assert loop.run_in_thread(lambda: 7, done)
    loop.run()
    assert found == [7, threading.current_thread()]


def test_an_oserror_is_given_and_anything_else_raised(loop: Loop) -> None:
    """The first is the world's, the second a mistake of ours."""
    found: list[object] = []
    loop.run_in_thread(lambda: Path("/nonexistent/folder").stat(), lambda result: (found.append(result), loop.stop()))
    loop.run()
    assert isinstance(found[0], FileNotFoundError)
    again = Loop()
    again.run_in_thread(lambda: 1 // 0, found.append)
    with pytest.raises(ZeroDivisionError):
        again.run()


@pytest.mark.usefixtures("no_descriptors")
def test_it_needs_no_descriptors(loop: Loop) -> None:
    """The launcher has none left, and still looks whether its generation holds."""
    found: list[object] = []
    loop.run_in_thread(lambda: 7, lambda result: (found.append(result), loop.stop()))
    loop.run()
    assert found == [7]


def test_work_of_one_key_is_done_once_at_a_time(loop: Loop) -> None:
    """A file server that hangs holds one thread and not one for every second."""
    hanging = threading.Event()
    found: list[str] = []

    def done(result: str | OSError) -> None:
        found.append(str(result))
        loop.stop()

    def work() -> str:
        hanging.wait()
        return "looked"

    assert loop.run_in_thread(work, done, key="look")
    threads = threading.active_count()
    assert [loop.run_in_thread(work, done, key="look") for _ in range(100)] == [False] * 100
    assert threading.active_count() == threads
    assert loop.run_in_thread(lambda: "other", lambda _: hanging.set(), key="other")
    loop.run()
    assert found == ["looked"]
    assert loop.run_in_thread(work, done, key="look"), "it is over, and may be done again"


def test_many_threads_at_once_are_all_heard(loop: Loop) -> None:
    """More than fit into what wakes the loop."""
    heard: list[int] = []
    threads = [
        threading.Thread(target=lambda: [loop.call_soon_threadsafe(lambda: heard.append(1)) for _ in range(5000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    loop.every(0.01, lambda: len(heard) == 20_000 and loop.stop())  # type: ignore[arg-type,func-returns-value]
    loop.run()
    assert len(heard) == 20_000
