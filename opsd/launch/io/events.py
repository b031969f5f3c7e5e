"""The launcher's event stream: one JSON object a line, to every file that wants it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from opsd.launch.io.messages import say

_AT_ONCE = 1 << 20


class EventLog:
    """Writes events to several files. A file that cannot be written is reported once and does not stop the run.

    A disk that fills up may take a part of a line: the next one then begins anew.

    ``relay`` is given every event as well, for somebody else to write down.
    """

    def __init__(self, run: str, node: str, targets: Sequence[Path]) -> None:
        self._common = {"run": run, "node": node}
        self._files = [(path, open(path, "ab", buffering=0)) for path in targets]  # noqa: SIM115
        self._failed: set[Path] = set()
        self._torn: set[Path] = set()
        self.generation = 0
        self.relay: Callable[[dict[str, object]], None] | None = None

    def emit(self, event: str, **fields: object) -> None:
        """Append one event of the current generation, with the time of now."""
        self.write(event, None, fields)

    def write(self, event: str, t: float | None, fields: Mapping[str, object], *, relayed: bool = True) -> None:
        """Append one event of the current generation; ``t`` in wall seconds, now if None."""
        own = {"t": time.time() if t is None else t, "event": event, "generation": self.generation}
        record = {**own, **self._common, **fields}
        self.append(record)
        if relayed and self.relay is not None:
            self.relay(record)

    def append(self, record: Mapping[str, object]) -> None:
        """Append an event that is complete, for instance one from another node."""
        line = (json.dumps(record, default=str) + "\n").encode()
        for path, file in self._files:
            whole = b"\n" + line if path in self._torn else line
            try:
                if file.write(whole) == len(whole):
                    self._torn.discard(path)
                else:
                    self._torn.add(path)
            except OSError as error:
                if path not in self._failed:
                    self._failed.add(path)
                    say(f"events are not written to {path}: {error.strerror}")


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
