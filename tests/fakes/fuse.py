"""File systems of processes that never answer."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
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


@contextmanager
def holding_mount(at: Path) -> Iterator[None]:
    """As ``silent_mount``, but its server takes what it is asked: who waits for an answer cannot be killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    server = os.open(FUSE, os.O_RDWR)
    if libc.mount(
        b"holding", bytes(at), b"fuse", 0, f"fd={server},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    ):
        os.close(server)
        pytest.skip(f"cannot mount FUSE here: {os.strerror(ctypes.get_errno())}")
    thread = threading.Thread(target=_take, args=(server,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        libc.umount2(bytes(at), 1)  # by force, which gives up all that waits
        libc.umount2(bytes(at), 2)
        thread.join(20)
        os.close(server)


def _take(server: int) -> None:
    """Answer the first request, FUSE_INIT (linux/fuse.h), and no other."""
    try:
        while request := os.read(server, 1 << 20):
            _, operation, number = struct.unpack_from("=IIQ", request)
            if operation == 26:
                agreed = struct.pack("=IIIIHHIIHH28x", 7, 31, 65_536, 0, 0, 0, 65_536, 1, 16, 0)
                os.write(server, struct.pack("=IiQ", 16 + len(agreed), 0, number) + agreed)
    except OSError:
        return
