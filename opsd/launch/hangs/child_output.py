"""A short-lived child process whose output is kept, without blocking the event loop."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from opsd.launch.io.loop import Loop
from opsd.launch.ranks.process import GONE_S, spawn

_OUTPUT_LIMIT = 4 << 20


class ChildOutput:
    """Runs ``command`` and calls ``ended`` with its standard output, at most 4 MiB of it. Raises OSError."""

    def __init__(self, command: Sequence[str], loop: Loop, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._output = os.memfd_create("output")
        try:
            self._child = spawn(
                command, env=os.environ, cwd=Path("/"), output=self._output, error_output=subprocess.DEVNULL
            )
        except OSError:
            os.close(self._output)
            raise
        self._child.watch(loop, self._collect)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    def kill(self) -> None:
        """Kill it and what it has started."""
        self._child.kill_group()

    def close(self, limit_s: float) -> None:
        """Kill it and wait for its end for at most ``limit_s`` seconds; ``ended`` is not called."""
        self._child.kill_group()
        self._child.reap(limit_s)
        os.close(self._output)

    def _collect(self) -> None:
        with open(os.dup(self._output), "rb") as file:
            file.seek(0)
            text = file.read(_OUTPUT_LIMIT).decode(errors="replace")
        self.close(GONE_S)
        self._ended(text)
