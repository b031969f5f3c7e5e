"""TCP ports for listeners that will be started later."""

from __future__ import annotations

import errno
import random
import socket
from typing import Final

MOST_MARKED: Final = 200
"""Marks beyond which they are somebody's who wants to leave none to others, and count no longer."""

_for_good: list[ReservedPort] = []


class ReservedPort:
    """A TCP port that nobody listens on, below the kernel's ephemeral range. Raises OSError if there is none.

    No other ReservedPort of this network namespace has the ``number`` while this object, or a child process that
    inherited it, exists: the listener may be a rank that binds the port a minute later, after its imports. The mark is
    a Unix socket in the abstract namespace, whose scope is the network namespace too; the port itself is left alone,
    since a program that binds it without SO_REUSEADDR would be refused.
    """

    def __init__(self, first: int = 20_000, last: int = 30_000) -> None:
        marked = 0
        for number in random.sample(range(first, last), k=last - first):
            mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            marked += not (unmarked := _is_unmarked(mark, number))
            if (unmarked or marked > MOST_MARKED) and _can_be_bound(number):
                self.number = number
                self._mark = mark
                return
            mark.close()
        raise OSError(f"no free TCP port between {first} and {last}")


def free_port() -> int:
    """A port that stays reserved until this process ends. Raises OSError if there is none."""
    _for_good.append(ReservedPort())
    return _for_good[-1].number


def _is_unmarked(mark: socket.socket, number: int) -> bool:
    """A sandbox that forbids the mark does not forbid the port."""
    try:
        mark.bind(f"\0opsd-port-{number}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def _can_be_bound(number: int) -> bool:
    with socket.socket(socket.AF_INET) as probe:
        try:
            probe.bind(("", number))
        except OSError:
            return False
    return True
