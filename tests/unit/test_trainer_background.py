"""What is done beside the training: in order, soon, and never for long in its way."""

from __future__ import annotations

import threading
import time

import pytest

from opsd.threads import LIMIT, Background


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
