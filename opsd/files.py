"""Writing reports so that a reader never sees half of one, and reading files of settings with a bound."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

MAX_SETTINGS = 1 << 20
"""Size in bytes of the largest file of settings, certificate or key that is read."""


def read_settings(path: Path) -> bytes:
    """The content of a file that a person has written.

    Raises OSError, also for what is no regular file and for one of more than a mebibyte: a pipe by mistake would stop
    an agent that reloads, and a log would fill its memory.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(MAX_SETTINGS + 1)
    if len(content) > MAX_SETTINGS:
        raise OSError(errno.EFBIG, f"larger than {MAX_SETTINGS >> 20} MiB", str(path))
    return content


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, "-" being stdout. Raises OSError.

    A regular file is replaced by rename after its content is durable; a symbolic link is replaced, not followed.
    Devices and pipes are written to as they are.
    """
    if str(path) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
