"""Collectors whose outcome a test decides."""

from __future__ import annotations

import threading
from collections.abc import Callable

from opsd.collectors.base import Metric, NoData, Reading, Sample

VALUE = Metric("opsd_fake_value", "A value that a test sets.", labels=("source",))


class FakeCollector:
    """Delivers what ``answer`` returns, or raises what it raises."""

    metrics = (VALUE,)
    interval_s = 0.0

    def __init__(self, name: str, answer: Callable[[], Reading | NoData] | None = None) -> None:
        self.name = name
        self.calls = 0
        self.answer = answer or (lambda: Reading((Sample(VALUE, float(self.calls), (name,)),)))

    def collect(self) -> Reading | NoData:
        self.calls += 1
        return self.answer()


class HangingCollector(FakeCollector):
    """Does not return until ``release`` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.release = threading.Event()

    def collect(self) -> Reading | NoData:
        self.calls += 1
        self.release.wait(60)
        return self.answer()
