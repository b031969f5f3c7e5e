"""A run's own records: its events and its steps, a JSON object a line. Its plan lies beside them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from opsd.files import open_regular
from opsd.words import plural

EVENTS, METRICS, STEPS, PLAN = "events.jsonl", "metrics.jsonl", "steps.jsonl", "plan.json"
PLACES = "tracking/places.json"
"""By tracker of experiments, the address or the folder in which it has the run."""
_NUMBERS: Final = (
    "t", "generation", "step", "steps", "tokens", "new_tokens", "step_s", "data_s", "checkpoint_s", "evaluation_s",
    "load_s", "noticed_s", "silent_s", "stuck_s",
)  # fmt: skip
_BELOW: Final = 1e18
_LONGEST_LINE: Final = 1 << 24
_LONGEST_PLAN: Final = 1 << 16
"""Characters."""
_LOST_NODES: Final = ("node_lost", "node_retired")

Opener = Callable[[str, int], int]


class RunRecords(NamedTuple):
    """The events of a run and the lines about its steps, each in the order of time.

    ``unread`` says in a sentence each how many lines of a file could not be read.
    """

    events: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    unread: list[str]


class LedgerError(Exception):
    """There is no data for a ledger; the message says what is missing."""


def open_run_file(path: str, flags: int) -> int:
    """For open() as its ``opener``: a regular file of a run. Raises OSError.

    For root no link in the folder of another user is followed: what is read may be shown there (``report.html``).
    """
    if os.geteuid() or Path(path).parent.stat().st_uid == 0:
        return open_regular(path, flags)
    try:
        return open_regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a link of another user, which root does not follow", path) from None
        raise


def read_records(folder: Path, opener: Opener = open_run_file) -> RunRecords:
    """The records of the run in ``folder``.

    A program may have a metrics.jsonl of its own in the folder, whose lines lack the seconds of a step.
    ``opener`` opens the files, as in open(). Raises LedgerError if there are no events.
    """
    unread: list[str] = []
    try:
        events = list(read_lines(folder / EVENTS, ("t", "event", "generation"), opener, unread))
    except OSError as error:
        raise LedgerError(f"{folder} is not a run folder: {EVENTS}: {error.strerror}") from error
    metrics: list[dict[str, Any]] = []
    for name in (METRICS, STEPS):
        with suppress(OSError):
            metrics = metrics or list(read_lines(folder / name, ("t", "step", "generation", "step_s"), opener, unread))
    return RunRecords(sorted(events, key=_time), sorted(metrics, key=_time), unread)


def read_lines(
    path: Path, required: Sequence[str], opener: Opener = open_run_file, unread: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """The JSON objects of ``path`` that have all ``required`` keys. Raises OSError.

    Lines that a crash has cut off are skipped, and lines with an invalid number, duration or count. So are lines of
    more than 16 Mi characters, since an endless line would fill the memory. ``unread`` gets a sentence about lines that
    are not JSON.
    """
    skipped: list[int] = []
    with open(path, encoding="utf-8", errors="replace", opener=opener) as file:
        for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE), ""), 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                if line.endswith("\n"):  # else it is being written, or was cut off
                    skipped.append(number)
                continue
            if isinstance(record, dict) and all(record.get(key) is not None for key in required) and _is_sound(record):
                yield record
    if skipped and unread is not None:
        unread.append(f"{plural(len(skipped), 'line')} of {path.name} cannot be read (the first is line {skipped[0]})")


def read_plan(folder: Path, opener: Opener = open_run_file) -> str:
    """The text of the run's plan, as long as it can be. Raises OSError."""
    with open(folder / PLAN, encoding="utf-8", errors="replace", opener=opener) as file:
        return file.read(_LONGEST_PLAN)


def read_places(folder: Path, opener: Opener = open_run_file) -> dict[str, str]:
    """Links to the run in trackers, by their names; empty if unknown."""
    try:
        with open(folder / PLACES, encoding="utf-8", errors="replace", opener=opener) as file:
            found = json.loads(file.read(_LONGEST_PLAN))
    except (OSError, ValueError, RecursionError):
        return {}
    known = found if isinstance(found, dict) else {}
    return {name: place for name, place in known.items() if isinstance(place, str)}


def _is_sound(record: Mapping[str, Any]) -> bool:
    if not isinstance(record.get("event", ""), str):
        return False
    values = (value for name in _NUMBERS if (value := record.get(name)) is not None)
    return all(isinstance(value, int | float) and abs(value) < _BELOW for value in values)


def lost_nodes(events: Sequence[Mapping[str, Any]]) -> int:
    """How many nodes the run has lost, or had replaced."""
    return sum(event["event"] in _LOST_NODES for event in events)


def gpus_of(events: Sequence[Mapping[str, Any]]) -> int:
    """Those of the newest generation, 0 if nobody has told."""
    told = (event.get("gpus") for event in reversed(events) if event["event"] == "generation_started")
    newest = next(told, None)
    return newest if isinstance(newest, int) else 0


def _time(record: Mapping[str, Any]) -> float:
    return float(record["t"])
