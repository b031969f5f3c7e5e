"""Work that may block, done beside the loop."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import TypeVar

from opsd.launch.io.loop import Loop

T = TypeVar("T")


def aside(loop: Loop, work: Callable[[], T], done: Callable[[T | OSError], None], *, key: str = "") -> bool:
    """Do ``work`` in a thread, then call ``done`` from the loop with what it returned or the OSError it raised.

    Any other exception comes out of the loop, as if ``work`` had been called there. The thread does not keep the
    process from ending: a file system that hangs must not hang the launcher.

    Work with a ``key`` is done once at a time: while some of the same key is under way, perhaps for minutes, nothing is
    done and False returned.
    """
    if key:
        if key in loop.busy:
            return False
        loop.busy.add(key)

    def run() -> None:
        outcome: T | Exception
        try:
            outcome = work()
        except Exception as error:
            outcome = error
        loop.call_soon_threadsafe(lambda: finish(outcome))

    def finish(outcome: T | Exception) -> None:
        loop.busy.discard(key)
        if isinstance(outcome, Exception) and not isinstance(outcome, OSError):
            raise outcome
        done(outcome)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:
        no_thread = OSError(errno.EAGAIN, "no thread can be started; the limit of processes (`ulimit -u`) is reached")
        loop.later(0.0, lambda: finish(no_thread))
    return True
