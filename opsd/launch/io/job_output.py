"""The story of a run in its folder, and in the job's own output once nobody else writes there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from opsd.launch.io.messages import say
from opsd.launch.io.story import Story

STORY = "job.log"
BATCH_HOST = "OPSD_BATCH_HOST"
"""The node with the batch script, by which the story comes to the job's output while it lives."""
JOB_OUTPUT = "OPSD_JOB_OUTPUT"
"""``INODE:PATH`` of that output, where it is a file."""


class StoryLog:
    """Writes the story to ``job.log`` in ``folder``. A file that cannot be written is reported once."""

    def __init__(self, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._path = folder / STORY
        self._story = Story()
        self._batch_host = environ.get(BATCH_HOST, "")
        inode, _, path = environ.get(JOB_OUTPUT, "").partition(":")
        self._output = Path(path) if path and inode.isdecimal() else None
        self._inode = int(inode) if inode.isdecimal() else 0
        self._orphaned = False
        self._failed = False

    def tell(self, event: Mapping[str, Any]) -> None:
        """Append the line of ``event``, if it has one."""
        line = self.remember(event)
        if not line:
            return
        try:
            _append(self._path, line)
        except OSError as error:
            if not self._failed:
                say(f"the story of the run is not written to {self._path}: {error.strerror}")
            self._failed = True
        if self._orphaned and self._output is not None:
            with suppress(OSError):
                if self._output.stat().st_ino == self._inode:
                    _append(self._output, f"opsd: {line}", create=False)

    def remember(self, event: Mapping[str, Any]) -> str:
        """Take ``event`` into account, which an earlier leader may have told already; its line."""
        if self._batch_host and event.get("event") == "node_lost" and event.get("lost") == self._batch_host:
            self._orphaned = True
        elif self._batch_host in _present(event):
            self._orphaned = False  # it was lost in an earlier start, or came back: the job's output is its own again
        return self._story.line(event)


def _present(event: Mapping[str, Any]) -> tuple[object, ...]:
    """The nodes that have a launcher, as far as ``event`` says so."""
    if event.get("event") == "generation_started":
        return (*(event.get("nodes") or ()), *(event.get("spares") or ()))
    return (event.get("joined"),)


def _append(path: Path, line: str, *, create: bool = True) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)
