"""Ctrl-C while modules are imported: nothing was begun, so it ends the program there and then.

As an exception it would be a traceback, or be lost in a module that catches all, as dill does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from opsd import exitcodes


def _end(*_: object) -> None:
    os.write(2, b"opsd: interrupted\n")
    os._exit(exitcodes.INTERRUPTED)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Have an interrupt end the program, unless it is handled or ignored by somebody."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def become(command: list[str]) -> None:
    """Run a command of opsd in the place of this one. An interrupt waits until Python has started again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execv(command[0], command)  # noqa: S606  # this program once more
