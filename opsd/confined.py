"""Processes in which what users wrote is made sense of, so that it takes none of the memory of who asks for it."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import subprocess
from pathlib import Path
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _SAME, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_INSTRUCTION: Final = struct.Struct("=HBBI")
_LEFT: Final = {
    "x86_64": (0xC000003E, (0, 1, 3, 5, 8, 9, 10, 11, 12, 15, 25, 28, 60, 202, 228, 231)),
    "aarch64": (0xC00000B7, (63, 64, 57, 80, 62, 222, 226, 215, 214, 139, 216, 233, 93, 98, 113, 94)),
}
"""By machine what seccomp calls it, and the numbers there of read, write, close, fstat, lseek, mmap, mprotect, munmap,
brk, rt_sigreturn, mremap, madvise, exit, futex, clock_gettime and exit_group."""


class _Program(ctypes.Structure):
    """``struct sock_fprog`` in linux/filter.h."""

    _fields_ = (("number", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def confine(
    process: subprocess.Popen[bytes] | subprocess.Popen[str],
    memory: int,
    seconds: int | None = None,
    written: int | None = None,
) -> None:
    """Limit a child to ``memory`` bytes, ``seconds`` of a processor, and files of ``written`` bytes. Raises OSError.

    If it and its parent do not fit into the service's memory, the kernel ends the child and not the parent.
    """
    limits = ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, written))
    for limit, value in limits:
        if value is not None:
            resource.prlimit(process.pid, limit, (value, value))
    Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")


def let_go() -> None:
    """Have the kernel refuse this process, which has one thread, all but memory and what it has open already.

    Whatever its user and capabilities are: no file, socket, process or signal is left to it. Nothing is refused on
    machines, or by kernels, that know no such filter (seccomp(2)).
    """
    machine, left = _LEFT.get(os.uname().machine, (0, ()))
    program = [(_LOAD, 0, 0, 4), (_SAME, 0, len(left) + 1, machine), (_LOAD, 0, 0, 0)]
    program += [(_SAME, len(left) - place, 0, number) for place, number in enumerate(left)]
    program += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    code = b"".join(_INSTRUCTION.pack(*one) for one in program)
    if left and _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        _LIBC.prctl(_SECCOMP, _FILTER, ctypes.byref(_Program(len(program), code)), 0, 0)
