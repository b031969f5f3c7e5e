"""What the batch script reads from the run's folder: its log, lost nodes, and the newest durable step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

EVENTS, JOB_LOG = "events.jsonl", "job.log"


class FileTail:
    """Lines appended to a file from now on; all lines if the file does not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = _size(path)

    def read(self) -> bytes:
        """The complete lines since the last call."""
        try:
            if self._path.stat().st_size <= self._offset:
                return b""
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(1 << 20)
        except OSError:
            return b""
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == 1 << 20 else b"")
        self._offset += len(whole)
        return whole

    def records(self) -> Iterator[dict[str, Any]]:
        """The same lines as JSON objects; other lines are skipped."""
        for line in self.read().splitlines():
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


class RunEvents:
    """The run in ``folder``, from now on."""

    def __init__(self, folder: Path) -> None:
        self._events = FileTail(folder / EVENTS)
        self._job_log = FileTail(folder / JOB_LOG)
        self._lost: set[str] = set()
        self._step = 0

    def job_log(self) -> bytes:
        """New lines of the run's log."""
        return self._job_log.read()

    @property
    def lost(self) -> frozenset[str]:
        """The nodes that were lost and have not come back."""
        self._take()
        return frozenset(self._lost)

    @property
    def step(self) -> int:
        """The highest step with a durable checkpoint, 0 without any."""
        self._take()
        return self._step

    def _take(self) -> None:
        while records := list(self._events.records()):
            for record in records:
                event = record.get("event")
                if event == "node_lost":
                    self._lost.add(str(record.get("lost")))
                elif event in ("launcher_joined", "spare_joined"):
                    self._lost.discard(str(record.get("joined")))
                elif event == "checkpoint_committed" and isinstance(record.get("step"), int):
                    self._step = max(self._step, record["step"])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
