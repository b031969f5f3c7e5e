"""The checkout, trees of files, and file systems that are small, hostile or full.

The checkout, and small trees of files that stand for sysfs or procfs.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from opsd.preflight.base import Context, Finding, Outcome

ROOT = Path(__file__).parents[2]


def write_tree(root: Path, files: Mapping[str, str | int]) -> Path:
    """Write each text to its path below ``root``, with the line end that the kernel gives. Returns ``root``."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


# Preflight checks on files that a test has written in place of /proc, /sys and /dev.


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write ``files`` (path to content) below ``root``."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n", encoding="utf-8")
    return root


def look(check: ModuleType, root: Path, **fields: Any) -> Outcome:
    """Run a check's function on the fixture tree ``root``."""
    context = Context("node-1", "quick", 0.1, proc=str(root), sys=str(root), dev=str(root), **fields)
    outcome: Outcome = check.run(context, lambda share, subject: None)
    return outcome


def summaries(findings: Iterable[Finding]) -> list[str]:
    """The first sentence of each."""
    return [finding.summary for finding in findings]


# Small file systems in memory, for disks that are full or read-only.


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Mount one at ``folder``, with ``options`` of mount(8). The test is skipped where that is not permitted."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


# Tables of mounts as kernels print them.


MOUNTINFO = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
30 27 0:27 / /dev/shm rw - tmpfs tmpfs rw,size=24684096k
40 27 259:3 / /scratch rw,noatime - xfs /dev/nvme1n1 ro,attr2
41 27 259:3 /sub /srv/bind\\040mount rw,noatime - xfs /dev/nvme1n1 ro,attr2
50 27 0:51 / /data rw,relatime - nfs4 10.0.0.1:/export rw,vers=4.2,nconnect=8
51 27 0:52 / /lustre rw - lustre 10.0.0.2@o2ib:/scratch rw
52 27 0:53 / /bucket rw - fuse.s3fs s3fs rw
53 27 0:54 / /sys/fs/fuse/connections rw - fusectl fusectl rw
this line is nonsense
"""

MOUNTSTATS = """\
device proc mounted on /proc with fstype proc
device 10.0.0.1:/export mounted on /data with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576
\tage:\t1234
\tbytes:\t11 22 33 44 5000 6000 7 8
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 0 0 2 0 0 47 47 0 49 0 2 12 3
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: 100 103 2 17000 1048576 40 800 900 0
\t       WRITE: 7 7 0 100 200 1 14 21
\t     LOOKUP: not numbers

device /dev/nvme0n1p2 mounted on / with fstype ext4
"""


# File systems of processes that never answer.


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
