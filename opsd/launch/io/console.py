"""Follows the logs of the ranks and copies them to the console, in a thread of its own.

The ranks write to their files and never wait for the console; a console that stands still holds up this thread only.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from opsd.launch.io.messages import say

_CHUNK = 256 * 1024
_INTERVAL_S = 0.1


@dataclass(slots=True)
class _Follower:
    file: BinaryIO
    prefix: bytes
    pending: bytes = b""
    last: bool = False


class Console:
    """Copies what is appended to the followed files to ``descriptor``, each line with its prefix."""

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._followers: list[_Follower] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._buffer = bytearray()
        self._thread: threading.Thread | None = None

    def follow(self, log: Path, prefix: str) -> None:
        """Copy ``log`` from its beginning; one that cannot be read is not shown."""
        try:
            follower = _Follower(open(log, "rb"), prefix.encode())  # noqa: SIM115  # closed by _copy
        except OSError as error:
            say(f"{log} cannot be shown: {error.strerror}")
            return
        with self._lock:
            self._followers.append(follower)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="console", daemon=True)
            self._thread.start()

    def end_generation(self) -> None:
        """Nothing will be added to the files followed so far: let each go once it is copied."""
        with self._lock:
            for follower in self._followers:
                follower.last = True

    def close(self, timeout_s: float = 5.0) -> None:
        """Copy what is left, for at most ``timeout_s`` seconds."""
        self.end_generation()
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    followers = list(self._followers)
                copied = sum(self._copy(follower) for follower in followers)
                if self._closing and not self._followers:
                    return
                if not copied:
                    self._wake.wait(_INTERVAL_S)
        except OSError as error:
            say(f"output is no longer shown here ({error.strerror}), see the logs")

    def _copy(self, follower: _Follower) -> bool:
        last = follower.last
        data = follower.file.read(_CHUNK)
        if not data and last:
            follower.file.close()
            with self._lock:
                self._followers.remove(follower)
        text = follower.pending + data
        whole = len(text) if (last and not data) or len(text) > _CHUNK else text.rfind(b"\n") + 1
        follower.pending = text[whole:]
        for line in text[:whole].splitlines(keepends=True):
            self._buffer += follower.prefix + line
        self._flush()
        return bool(data)

    def _flush(self) -> None:
        while self._buffer:
            del self._buffer[: os.write(self._descriptor, self._buffer)]
