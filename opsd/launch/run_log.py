"""The events of a run on several nodes, in one file that only the head writes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opsd.launch.events import EventLog
from opsd.launch.messages import say

OF_ONE_LAUNCHER = ("generation_started", "finished")
"""Each launcher has its own of these; the head's stand for the run."""


class RunLog:
    """``events.jsonl`` of the run folder. Opened when there is something to write, since only a head has anything."""

    def __init__(self, run: str, node: str, path: Path) -> None:
        self._run, self._node, self._path = run, node, path
        self._log: EventLog | None = None
        self._once: set[tuple[object, ...]] = set()
        self.generation = 0

    def emit(self, event: str, **fields: object) -> None:
        """Append an event of the run."""
        self._append({"t": time.time(), "event": event, "generation": self.generation, "node": self._node, **fields})

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        """Append what a node has noted ``age_s`` seconds ago.

        What the ranks of several nodes notice at the same time is one event: a checkpoint that is durable, a
        generation that makes its first step.
        """
        kind, generation = record["event"], record["generation"]
        if kind in OF_ONE_LAUNCHER:
            return
        if kind == "checkpoint_rejected":
            self._once = {key for key in self._once if key[0] != "checkpoint_committed"}
        if kind in ("checkpoint_committed", "resumed"):
            key = (kind, record.get("step") if kind == "checkpoint_committed" else generation)
            if key in self._once:
                return
            self._once.add(key)
        self._append({**record, "t": time.time() - age_s})

    def _append(self, record: Mapping[str, Any]) -> None:
        try:
            if self._log is None:
                self._log = EventLog(self._run, self._node, [self._path])
        except OSError as error:
            say(f"events are not written to {self._path}: {error.strerror}")
            self._log = EventLog(self._run, self._node, [])
        self._log.append({"run": self._run, **record})
