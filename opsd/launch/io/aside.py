"""Work that may block, done beside the loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from opsd.launch.io.loop import Loop

T = TypeVar("T")


def aside(loop: Loop, work: Callable[[], T], done: Callable[[T | OSError], None]) -> None:
    """Do ``work`` in a thread, then call ``done`` from the loop with what it returned or the OSError it raised.

    Any other exception comes out of the loop, as if ``work`` had been called there. The thread does not keep the
    process from ending: a file system that hangs must not hang the launcher.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    outcome: list[T | Exception] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)
        finally:
            os.close(writer)

    def finish() -> None:
        loop.unwatch(reader)
        os.close(reader)
        result = outcome[0]
        if isinstance(result, Exception) and not isinstance(result, OSError):
            raise result
        done(result)

    loop.watch(reader, finish)
    threading.Thread(target=run, daemon=True).start()
