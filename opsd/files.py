"""Files of others: settings with a bound, lines that are appended; and reports of which a reader never sees half."""

from __future__ import annotations

import codecs
import errno
import json
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from opsd import durable

SYSTEM_FILE = Path("/etc/opsd/opsd.toml")
"""The configuration of a node."""
MAX_SETTINGS = 1 << 20
"""Size in bytes of the largest file of settings, certificate or key that is read."""
PIPE_S = 3.0
"""Seconds that a pipe with settings may be silent."""
_AT_ONCE = 1 << 20


def read_settings(path: Path) -> bytes:
    """The content of a file that a person has written, without a byte order mark.

    It may also be ``/dev/null``, or a pipe (``<(…)`` of a shell).

    Raises OSError, also for other devices, for more than a mebibyte, and for a pipe without a writer for PIPE_S. They
    would fill the memory of an agent that reloads, or stop it.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with open(os.open(path, flags), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        is_null = stat.S_ISCHR(status.st_mode) and status.st_rdev == Path(os.devnull).stat().st_rdev
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode) or is_null):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = b""
        while len(content) <= MAX_SETTINGS:
            if not select.select([file], [], [], PIPE_S)[0]:
                raise OSError(errno.ETIMEDOUT, f"a pipe into which nobody writes for {PIPE_S:g} s", str(path))
            if not (chunk := file.read(MAX_SETTINGS + 1 - len(content))):
                return content.removeprefix(codecs.BOM_UTF8)
            content += chunk
    raise OSError(errno.EFBIG, f"larger than {MAX_SETTINGS >> 20} MiB", str(path))


def open_regular(path: str, flags: int, opener: Callable[[str, int], int] = os.open) -> int:
    """For open() as its ``opener``: nothing is waited for, such as somebody who writes into a pipe. Raises OSError."""
    descriptor = opener(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", path)


def write_text(path: Path, text: str, *, in_place: bool = True) -> None:
    """Write ``text`` to ``path``, "-" being stdout. Raises OSError.

    A regular file is replaced durably; a symbolic link is replaced, not followed.
    Devices and pipes are written to as they are, also behind a link. With ``in_place`` off they are replaced too,
    because another user than the one who chose ``path`` may have put them there.
    """
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    if in_place and path.exists() and not stat.S_ISREG(path.stat().st_mode):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    durable.replace(path, text.encode())


def oom_kills(proc: str = "/proc") -> int:
    """Processes killed by the kernel's out-of-memory killer since boot; 0 if the kernel does not count them."""
    with suppress(OSError):
        for line in Path(proc, "vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class FileTail:
    """Lines that another program appends to a regular file, which need not exist yet; no link at its name is followed.

    With ``at_end`` those that it has already are passed over.
    """

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        self._path = path
        self._offset = 0
        if at_end:
            with suppress(OSError):
                self._offset = path.stat().st_size

    def read(self) -> bytes:
        """The complete lines since the last call, at most a mebibyte at a time; a longer line comes in pieces."""
        try:
            with open(self._path, "rb", opener=lambda path, flags: open_regular(path, flags | os.O_NOFOLLOW)) as file:
                file.seek(self._offset)
                data = file.read(_AT_ONCE)
        except OSError:
            return b""
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == _AT_ONCE else b"")
        self._offset += len(whole)
        return whole

    def records(self) -> Iterator[dict[str, Any]]:
        """The same lines as JSON objects; other lines are skipped."""
        for line in self.read().splitlines():
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record
