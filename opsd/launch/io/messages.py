"""What the launcher says to people, on stderr."""

from __future__ import annotations

import atexit
import contextlib
import os
import select

from opsd.launch.io.behind import Behind

FLUSH_S = 1.0
"""What a reader of stderr that stands still is given when the launcher ends."""
_STDERR = 2


def say(text: str) -> None:
    """One line or paragraph. Never waits: nobody listening, or reading on, is no reason to hold up a run."""
    _behind.put(lambda: _print(text))


def flush(timeout_s: float = FLUSH_S) -> None:
    """Wait until all that was said is written, for at most ``timeout_s`` seconds."""
    _behind.flush(timeout_s)


def write_all(descriptor: int, data: bytes | bytearray) -> None:
    """Write all of ``data``, waiting for room also where somebody has made the descriptor non-blocking. OSError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            room.poll()


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        write_all(_STDERR, f"opsd launch: {text}\n".encode(errors="replace"))


def _missed(count: int) -> None:
    _print(f"{count} messages are not shown here: nobody read them in time")


_behind = Behind("messages", missed=_missed)
atexit.register(flush)
