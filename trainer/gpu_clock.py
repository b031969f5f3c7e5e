"""How long the GPU computes, by CUDA events that are read once they are complete: nothing waits for the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

MOST_PENDING = 16
"""Steps whose events may be incomplete; of more the oldest are given up."""


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that is used."""

    def record(self) -> None:
        """Note the time at which the GPU comes to this point of the current stream."""

    def query(self) -> bool:
        """Whether the GPU has come to it."""

    def elapsed_time(self, end_event: Any) -> Any:
        """Milliseconds to another event; both are complete."""


class GpuClock:
    """Times regions of the current stream. ``take`` ends a step and returns what is known of the newest earlier one."""

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._spare: list[Event] = []
        self._step: list[tuple[Event, Event]] = []
        self._pending: deque[list[tuple[Event, Event]]] = deque()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The region inside counts."""
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        self._step.append((begin, end))

    def take(self) -> float:
        """End the step. Returns the seconds of the newest step that the GPU has completed, 0.0 if none is new."""
        if self._step:
            self._pending.append(self._step)
            self._step = []
        seconds = 0.0
        while self._pending and (len(self._pending) > MOST_PENDING or self._pending[0][-1][1].query()):
            done = self._pending.popleft()
            if done[-1][1].query():
                seconds = float(sum(begin.elapsed_time(end) for begin, end in done)) / 1e3
            self._spare += [event for pair in done for event in pair]
        return seconds

    def _event(self) -> Event:
        return self._spare.pop() if self._spare else self._new_event()


def gpu_clock(device: torch.device) -> GpuClock | None:
    """A clock for ``device``, None if it is no CUDA device."""
    if device.type != "cuda":
        return None
    return GpuClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
