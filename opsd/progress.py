"""Progress of work that takes a while, on stderr: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from opsd.words import count, duration

T = TypeVar("T")
Look = Callable[[int, int | None], None]
"""Called with what is done and with all that there is to do, None if that is unknown."""
PLAIN_S = 5.0
"""Seconds between two lines."""


@contextmanager
def shown(verb: str, unit: str = "bytes") -> Iterator[Look]:
    """Show ``verb`` ("tokenising") while the block runs; what is done is counted in ``unit``."""
    if not sys.stderr.isatty():
        yield Lines(verb, unit)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    columns = (TextColumn(verb, markup=False), BarColumn(), *amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def tracked(items: Iterable[T], verb: str, unit: str, total: int | None = None) -> Iterator[T]:
    """``items``, with progress shown while they are taken."""
    with shown(verb, unit) as look:
        for number, item in enumerate(items):
            look(number, total)
            yield item


class Lines:
    """Progress as lines; work that ends within PLAIN_S has none."""

    def __init__(
        self,
        verb: str,
        unit: str,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verb, self._unit, self._say, self._clock = verb, unit, say, clock
        self._began = clock()
        self._next = self._began + PLAIN_S

    def __call__(self, done: int, total: int | None) -> None:
        now = self._clock()
        if now < self._next:
            return
        self._next = now + PLAIN_S
        text = f"{self._verb}: {self._amount(done)}"
        if total:
            text += f" of {self._amount(total)} ({done / total:.0%})"
            if 0 < done < total:
                text += f", {duration((total - done) * (now - self._began) / done)} left"
        self._say(f"opsd: {text}")

    def _amount(self, number: int) -> str:
        return f"{number / 1e9:.2f} GB" if self._unit == "bytes" else f"{count(number)} {self._unit}"
