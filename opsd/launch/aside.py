"""Work that may block, done beside the loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from opsd.launch.loop import Loop

T = TypeVar("T")


def aside(loop: Loop, work: Callable[[], T], done: Callable[[T | OSError], None]) -> None:
    """Do ``work`` in a thread, then call ``done`` from the loop with what it returned or the OSError it raised.

    The thread does not keep the process from ending: a file system that hangs must not hang the launcher.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    result: list[T | OSError] = []

    def run() -> None:
        try:
            result.append(work())
        except OSError as error:
            result.append(error)
        finally:
            os.close(writer)

    def finish() -> None:
        loop.unwatch(reader)
        os.close(reader)
        if result:
            done(result[0])

    loop.watch(reader, finish)
    threading.Thread(target=run, daemon=True).start()
