"""File systems of processes that never answer."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FUSE = Path("/dev/fuse")


@contextmanager
def silent_mount(at: Path, user: int = 0) -> Iterator[None]:
    """A FUSE file system of ``user`` at the folder or file ``at`` whose server reads nothing.

    What waits for it fails once it ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    server = os.open(FUSE, os.O_RDWR)
    options = f"fd={server},rootmode={0o40000 if at.is_dir() else 0o100000:o},user_id={user},group_id=0,allow_other"
    if libc.mount(b"silent", bytes(at), b"fuse", 0, options.encode()) != 0:
        os.close(server)
        pytest.skip(f"cannot mount FUSE here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.close(server)
        libc.umount2(bytes(at), 2)
