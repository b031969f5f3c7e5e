"""How often the agent looks for a kind of fault whose looks take long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from opsd.agent.judge import LONGEST_WAIT_S, SHARE, TICK_S, Judge, ProcessorTime
from opsd.agent.window import Window
from opsd.runbooks.base import Finding, Runbook, View
from tests.fakes.agent import SILENT
from tests.fakes.incidents import finding


class Looks:
    """A runbook whose looks take the seconds of processor time ``costs``, in turn, the last one from then on."""

    def __init__(self, *costs: float, look_every_s: float = 0.0) -> None:
        self.costs, self.used_s, self.times = list(costs), 0.0, list[float]()
        book = Runbook(self._detect, lambda *_: False, look_every_s=look_every_s, kind="trouble")
        self._judge = Judge([book], SILENT, used_s=lambda: self.used_s)

    def _detect(self, view: View) -> Iterator[Finding]:
        self.times.append(view.now)
        self.used_s += self.costs.pop(0) if len(self.costs) > 1 else self.costs[0]
        yield finding(kind="trouble")

    def run(self, seconds: int) -> list[float]:
        """A tick each second; the seconds of the looks. There is a finding in every tick."""
        window = Window("node", seconds=60)
        for second in range(seconds):
            window.begin(float(second), 1e9 + second)
            assert len(self._judge.findings(window)) == 1
        return self.times


def test_a_cheap_look_is_taken_in_every_tick() -> None:
    """What is less than its share costs nothing."""
    assert len(Looks(SHARE / 2).run(20)) == 20


def test_a_look_that_is_long_once_is_not_put_off() -> None:
    """It was the first, or something else took the processor."""
    assert len(Looks(5.0, 0.001, 0.001, 5.0, 0.001).run(20)) == 20


def test_looks_that_take_long_have_their_share() -> None:
    """Their findings stay valid meanwhile; the wait has a limit."""
    assert Looks(0.1).run(20) == [0.0, 1.0, 6.0, 11.0, 16.0]
    assert Looks(60.0).run(40) == [0.0, 1.0, 1.0 + LONGEST_WAIT_S, 1.0 + 2 * LONGEST_WAIT_S]


def test_the_interval_of_the_runbook_stands() -> None:
    """Unless the share asks for a longer one."""
    assert Looks(0.02, look_every_s=5.0).run(12) == [0.0, 5.0, 10.0]


def test_a_tick_has_its_share_and_what_waits_is_first_in_the_next() -> None:
    """Nothing is put off for good."""
    used, looked = 0.0, list[tuple[float, str]]()

    def detect(kind: str, view: View) -> Iterator[Finding]:
        nonlocal used
        looked.append((view.now, kind))
        used += 0.7 * TICK_S
        return iter(())

    books = [Runbook(partial(detect, kind), lambda *_: False, kind=kind) for kind in "abcde"]
    judge, window = Judge(books, SILENT, used_s=lambda: used), Window("node", seconds=60)
    for second in range(3):
        window.begin(float(second), 1e9 + second)
        judge.findings(window)
    assert looked == [(0, "a"), (0, "b"), (1, "c"), (1, "d"), (2, "e"), (2, "a")]


def test_waiting_takes_no_processor_time() -> None:
    """Work does, short or long."""
    used = ProcessorTime()
    began = used()
    time.sleep(0.3)
    waited = used() - began
    assert waited < 0.2
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        used()
    assert used() - began - waited > 0.04
