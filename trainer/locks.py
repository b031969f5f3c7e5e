"""Locks that show whether ranks, or their persist processes, are alive, on this node or another.

Each rank locks its byte of the file ``.saving`` and shares the lock with its persist process, so the byte is locked as
long as either lives.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from contextlib import suppress
from pathlib import Path

LOCKS = ".saving"
POLL_S = 0.02
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock of 64-bit Linux (fcntl(2)): type, whence, start, length, pid


def hold_lock(root: Path, rank: int) -> int:
    """A descriptor that locks the byte of ``rank`` as long as any process has it open.

    If the lock is not available (a hung process of an earlier start holds it, or the file system has no locks), a save
    is given up early if the ranks die; nothing else changes.
    """
    locks = _open(root)
    with suppress(OSError):
        fcntl.fcntl(locks, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
    return locks


def saving(root: Path, rank: int) -> bool:
    """Whether ``rank`` of an earlier start of the run, or its persist process, is still alive."""
    locks = _open(root)
    try:
        return locked(locks, rank, 1)
    finally:
        os.close(locks)


def locked(locks: int, start: int, length: int) -> bool:
    """Whether another process has a lock in the range; a ``length`` of 0 is unlimited."""
    try:
        answer = fcntl.fcntl(locks, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    except OSError:
        return False
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def wait_for_saves(root: Path, timeout_s: float) -> bool:
    """Wait until no rank or persist process has a lock in ``root``. False if one still has after ``timeout_s``."""
    locks = _open(root)
    deadline = time.monotonic() + timeout_s
    try:
        while locked(locks, 0, 0):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True
    finally:
        os.close(locks)


def _open(root: Path) -> int:
    return os.open(root / LOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
