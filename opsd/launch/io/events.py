"""The launcher's event stream: one JSON object a line, to every file that wants it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from opsd.launch.io.behind import Behind
from opsd.launch.io.messages import say

_AT_ONCE = 1 << 20


class EventFile:
    """One file of events. If it cannot be written, that is reported once and does not stop the run.

    A disk that fills up may take a part of a line: the next one then begins anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._failed = False
        self._torn = False

    def open(self) -> None:
        """Make the file if it is not there. Raises OSError."""
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # for as long as the launcher lives

    def append(self, line: bytes) -> None:
        """Write one encoded event; waits for as long as the file system does."""
        whole = b"\n" + line if self._torn else line
        try:
            self.open()
            assert self._file is not None
            self._torn = self._file.write(whole) != len(whole)
        except OSError as error:
            if not self._failed:
                self._failed = True
                say(f"events are not written to {self.path}: {error.strerror}")

    def missed(self, count: int) -> None:
        """Say that so many events were left out."""
        say(f"{count} events are missing in {self.path}: it did not take them in time")


def encoded(record: Mapping[str, object]) -> bytes:
    """An event as a line of a file."""
    return (json.dumps(record, default=str) + "\n").encode()


class EventLog:
    """Hands events to several files, each written in a thread of its own: a file system that hangs holds up nothing.

    Raises OSError if a file cannot be made. ``relay`` is given every event as well, for somebody else to write down.
    """

    def __init__(self, run: str, node: str, targets: Sequence[Path]) -> None:
        self._common = {"run": run, "node": node}
        self._files: list[tuple[EventFile, Behind]] = []
        for path in targets:
            file = EventFile(path)
            file.open()
            self._files.append((file, Behind(f"events for {path}", missed=file.missed)))
        self.generation = 0
        self.relay: Callable[[dict[str, object]], None] | None = None

    def emit(self, event: str, **fields: object) -> None:
        """Append one event of the current generation, with the time of now."""
        self.write(event, None, fields)

    def write(self, event: str, t: float | None, fields: Mapping[str, object], *, relayed: bool = True) -> None:
        """Append one event of the current generation; ``t`` in wall seconds, now if None."""
        own = {"t": time.time() if t is None else t, "event": event, "generation": self.generation}
        record = {**own, **self._common, **fields}
        line = encoded(record)
        for file, behind in self._files:
            behind.put(lambda file=file: file.append(line))  # type: ignore[misc]
        if relayed and self.relay is not None:
            self.relay(record)

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until the files have all events, for at most ``timeout_s`` seconds each."""
        for _, behind in self._files:
            behind.flush(timeout_s)


class EventTail:
    """Follows the event file of one rank from where it was left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[dict[str, object]]:
        """The complete lines added since the last call. Lines that are not JSON objects are skipped."""
        try:
            with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                file.seek(self._offset)
                data = file.read(_AT_ONCE)
        except OSError:
            return
        whole = data if len(data) == _AT_ONCE and b"\n" not in data else data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("event"), str):
                    yield record
