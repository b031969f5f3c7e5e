"""Looking at files and opening them without waiting for a server that does not answer, of FUSE or of a network.

A user may mount a FUSE file system on any of the user's own folders or files, also in shared memory. Any process that
opens or stats it then waits for a program of that user (fusermount3(1), with user_allow_other also root).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final, NamedTuple

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _AT_EMPTY_PATH, _AT_SYMLINK_NOFOLLOW, _AT_NO_AUTOMOUNT = -100, 0x1000, 0x100, 0x800
_AT_STATX_DONT_SYNC: Final = 0x4000
_BASIC, _MNT_ID = 0x7FF, 0x1000
_STATX: Final = struct.Struct("=I16xI4xH82xqI4xIIIIQ")
"""Of ``struct statx`` in linux/stat.h: mask, user, mode, mtime, rdev, dev, and mnt_id, which came with kernel 5.8."""
_BYTES: Final = 256


class Inode(NamedTuple):
    """What the kernel knows of a file. ``mount`` tells mounts apart, ``device`` is the device behind a device file."""

    mode: int
    user: int
    modified: float
    mount: tuple[int, int]
    device: tuple[int, int]


def look(path: str | os.PathLike[str], folder: int = _AT_FDCWD, *, follow: bool = True) -> Inode:
    """What is known here of the file at ``path``, or of the open ``folder`` if that is "". Raises OSError.

    Of a file on a server that does not answer it may be old.
    """
    found = ctypes.create_string_buffer(_BYTES)
    flags = _AT_STATX_DONT_SYNC | _AT_NO_AUTOMOUNT | (0 if follow else _AT_SYMLINK_NOFOLLOW)
    name = os.fsencode(path)
    if _LIBC.statx(folder, name, flags | (0 if name else _AT_EMPTY_PATH), _BASIC | _MNT_ID, found) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(path))
    mask, user, mode, seconds, nanoseconds, major, minor, of_major, of_minor, mount = _STATX.unpack_from(found)
    place = (mount, 0) if mask & _MNT_ID else (of_major, of_minor)
    return Inode(mode, user, seconds + nanoseconds / 1e9, place, (major, minor))


def open_beside(name: str | os.PathLike[str], folder: int, flags: int) -> int:
    """Open ``name`` in the open ``folder``, if nothing else is mounted there; no symbolic link. Raises OSError."""
    at = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if look("", at).mount != look("", folder).mount:
            raise OSError(errno.EXDEV, "another file system is mounted there", os.fspath(name))
        return os.open(f"/proc/self/fd/{at}", (flags | os.O_CLOEXEC) & ~os.O_NOFOLLOW)
    finally:
        os.close(at)


def open_folder(path: os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open the folder ``path`` in the same way, beside what lies in the folder above it. Raises OSError."""
    above, name = os.path.split(os.fspath(path))
    parent = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_beside(name, parent, flags | os.O_DIRECTORY)
    finally:
        os.close(parent)
