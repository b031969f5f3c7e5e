"""The launcher's side of its guard, the process that ends what ranks leave if the launcher is killed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from opsd.client import process_start
from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import print_message
from opsd.launch.ranks import leftovers
from opsd.launch.ranks.process import GONE_S, Child, launcher_mark, spawn

_AGAIN_S = 1.0


class Guard:
    """A guard that is there while the launcher is: one that ends is replaced."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        """``folder`` is that of the run, as its ranks know it."""
        self._loop = loop
        self._folder = folder
        self._child: Child | None = None
        self._channel: socket.socket | None = None
        self._ranks = "ranks"
        self._start()

    @property
    def pids(self) -> Collection[int]:
        """Its process, which is no rank's."""
        return () if self._child is None else (self._child.pid,)

    def watch(self, ranks: Collection[int]) -> None:
        """From now on these are the processes of ranks; they have not been collected yet."""
        self._ranks = " ".join(["ranks", *(f"{pid}:{process_start(pid)}" for pid in ranks)])
        self._say(self._ranks)

    def close(self) -> None:
        """The launcher is about to end, and has ended its ranks."""
        self._say(leftovers.DONE)
        self._collect()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = (sys.executable, "-I", "-S", leftovers.__file__, launcher_mark(), str(self._folder))
        env = {name: value for name, value in os.environ.items() if name != leftovers.LAUNCHER}
        with theirs:
            ours.send(self._ranks.encode())  # before it begins: the launcher may be killed at any time
            try:
                self._child = spawn(
                    command, env=env, cwd=Path("/"), stdin=theirs.fileno(), output=subprocess.DEVNULL, error_output=2
                )
            except OSError as error:
                ours.close()
                print_message(f"there is no guard over what ranks leave: {error.strerror}")
                return
        self._channel = ours
        ours.setblocking(False)
        self._child.watch(self._loop, self._ended)

    def _ended(self) -> None:
        self._collect()
        self._loop.later(_AGAIN_S, self._start)

    def _collect(self) -> None:
        if self._child is not None and self._channel is not None:
            self._channel.close()
            self._child.reap(GONE_S)
            self._child = self._channel = None

    def _say(self, message: str) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):  # it has ended, and is replaced, or it is stopped
                self._channel.send(message.encode())
