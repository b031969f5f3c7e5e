"""The events of a run on several nodes, in one file that only the head writes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from opsd.launch.io.behind import Behind, Work
from opsd.launch.io.events import EventFile, EventLog, encoded
from opsd.launch.io.job_output import StoryLog

OF_ONE_LAUNCHER = ("generation_started", "finished")
"""Each launcher has its own of these; the head's stand for the run."""
_LOOK_BACK = 1 << 18


class Log(Protocol):
    """Where the head writes down what happens to the run; ``generation`` is the one that runs."""

    generation: int

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        """Append an event of the run, which came about ``age_s`` seconds ago."""
        ...

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        """Append what a node has noted ``age_s`` seconds ago."""
        ...


class OwnLog:
    """That of a run on one node: its launcher's own events, in which most of what the head says stands already."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.generation = 0

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        """See ``Log.emit``."""
        if event not in (*OF_ONE_LAUNCHER, "hang_detected"):
            self._events.write(event, time.time() - age_s, fields, relayed=False)

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        """The launcher has written it."""


class RunLog:
    """``events.jsonl`` of the run folder. Opened when there is something to write, since only a head has anything.

    It is read and written ``behind`` the caller's back, where there is such a thread: the folder is on a file server.
    """

    def __init__(self, run: str, node: str, path: Path, behind: Behind | None = None) -> None:
        self._run, self._node = run, node
        self._file = EventFile(path)
        self._story = StoryLog(path.parent)
        self._do: Callable[[Work], None] = behind.put if behind is not None else lambda work: work()
        self._once: set[tuple[object, ...]] = set()
        self.generation = 0
        self._do(self._read)

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        """See ``Log.emit``."""
        t = time.time() - age_s
        self._append({"t": t, "event": event, "generation": self.generation, "node": self._node, **fields})

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        """Append what a node has noted ``age_s`` seconds ago.

        What the ranks of several nodes notice at the same time is one event: a checkpoint that is durable, a
        generation that makes its first step.
        """
        if record["event"] in OF_ONE_LAUNCHER:
            return
        dated = {**record, "t": time.time() - age_s}
        self._do(lambda: self._write(dated) if self._note(dated) else None)

    def _read(self) -> None:
        for record in _written(self._file.path):
            self._note(record)
            self._story.remember(record)

    def _note(self, record: Mapping[str, Any]) -> bool:
        """False for an event that is known."""
        kind = record["event"]
        if kind == "checkpoint_rejected":
            self._once = {key for key in self._once if key[0] != "checkpoint_committed"}
        if kind not in ("checkpoint_committed", "resumed"):
            return True
        key = (kind, record.get("step") if kind == "checkpoint_committed" else record["generation"])
        known = key in self._once
        self._once.add(key)
        return not known

    def _append(self, record: Mapping[str, Any]) -> None:
        self._do(lambda: self._write(record))

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.append(encoded({"run": self._run, **record}))
        self._story.tell(record)


def _written(path: Path) -> Iterator[dict[str, Any]]:
    """The newest of what heads before this one have written."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOOK_BACK))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and {"event", "generation"} <= record.keys():
                yield record
