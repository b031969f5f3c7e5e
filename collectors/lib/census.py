"""How many processes there are in each state; read a part at a time, as users may start hundreds of thousands."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Final

PROCESS_STATES: Final[Mapping[str, str]] = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
    "I": "idle",
}
"""State letters of proc_pid_stat(5)."""
LOOK_S: Final = 0.05
"""Seconds that one look reads at most."""
_STEP: Final = 32


class Census:
    """Counts the processes below ``proc``. A count that takes several looks is of no single moment."""

    def __init__(self, proc: Path, clock: Callable[[], float]) -> None:
        self._proc, self._clock = proc, clock
        self._letters: Iterator[str] | None = None
        self._counting = Counter[str]()
        self._counted: Mapping[str, int] = {}

    def begin(self) -> None:
        """Begin another count, unless one is under way."""
        if self._letters is None:
            self._letters, self._counting = _state_letters(self._proc), Counter()

    def go_on(self) -> Mapping[str, int]:
        """Count for a moment if a count is under way; the processes by state, every state, of the last whole one.

        Empty before the first. Raises OSError if ``proc`` is not there.
        """
        until = self._clock() + LOOK_S
        while self._letters is not None:
            part = list(islice(self._letters, _STEP))
            self._counting.update(PROCESS_STATES.get(letter, "other") for letter in part)
            if len(part) < _STEP:
                self._letters = None
                self._counted = {state: self._counting[state] for state in (*PROCESS_STATES.values(), "other")}
            elif self._clock() >= until:
                break
        return self._counted


def _state_letters(proc: Path) -> Iterator[str]:
    with os.scandir(proc) as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError), open(f"{entry.path}/stat", "rb", buffering=0) as file:  # it may end
                    yield chr(file.read(512).rpartition(b") ")[2][0])
