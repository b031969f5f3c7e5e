"""Exit codes of every opsd command; the numbers are part of the interface."""

from __future__ import annotations

import errno
from typing import Final

OK: Final = 0
FAILED: Final = 1
"""The command ran and the answer is no: a rank failed beyond repair, a check failed, a fault was not repaired."""
USAGE: Final = 2
"""The command line or a configuration file is wrong, or names a run or a file that does not exist; nothing was
started. `opsd launch` also ends with it if a companion listens on all addresses."""
INTERRUPTED: Final = 3
"""Stopped by the user before it was done."""
BROKEN: Final = 4
"""A bug in opsd most likely, which the traceback shows; it says nothing about the node or the run."""
REPEATED: Final = 70
"""``opsd launch``: the same failure came back; restarting again would not help."""
NO_SPACE: Final = 74
"""The disk or the quota below a file or the output is full, or stdout is closed; the node and the run may be well."""
REQUEUE: Final = 75
"""``opsd launch``: run the job again: stopped in good order with the state saved, or too few nodes are left (then from
the last checkpoint)."""
FENCED: Final = 76
"""``opsd launch``, ``python -m opsd.trainer``, trainers with an adapter: another copy of the run has begun or still
runs, or a later generation of it has begun elsewhere."""
NOT_FOUND: Final = 127
"""``opsd launch``: the program does not exist or cannot be executed."""

UNREAD: Final = 141
"""The reader of the output went away, as in ``opsd config show | head -1``; as a shell tells of SIGPIPE."""


def of_error(error: OSError, otherwise: int = FAILED) -> int:
    """The exit code after ``error``: ``NO_SPACE`` if the disk or the quota is full."""
    return NO_SPACE if is_full(error.errno) else otherwise


def is_full(number: int | None) -> bool:
    """Whether the error of this number means that a disk or a quota is full."""
    return number in (errno.ENOSPC, errno.EDQUOT)
