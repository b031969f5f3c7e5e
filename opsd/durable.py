"""Making files durable: whole or not at all, and still there after a power loss. Everything durable is written here.

A function that returns has done it. If it raises ``Unproved``, it has done it too, and others may have seen it. But the
storage did not confirm that it outlives a power loss: call again to prove it, and never undo it. After any other
OSError the earlier content is still there.

Content is written to a draft, ``.NAME.PROCESS.RANDOM.draft`` beside the target, and synced before it gets its name. The
next write to the same target from the same machine removes the draft of a killed process. Otherwise the first write
``FORGOTTEN_S`` later removes it.

A failed fsync of a file is never repeated, because Linux drops the pages that it could not write: the file is written
again instead. A folder may be synced again; file systems keep the failure of a journal (ext4 and XFS go read-only).
Standard library only.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

FORGOTTEN_S = 3600.0
"""Age in seconds, by the clock of the file system, at which a draft is taken for that of a dead process."""
DRAFT = ".draft"
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links (link(2))."""
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

Link = Callable[[Path, Path], None]
"""Makes a hard link, as ``os.link`` does."""


class Unproved(OSError):
    """The file is in place, but the storage did not confirm that it outlives a power loss."""


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable, if the file system supports that. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise _named(error, folder) from error
    finally:
        os.close(descriptor)


def sync(file: BinaryIO) -> None:
    """Make the content of ``file`` durable, if it is on a disk. Raises OSError."""
    try:
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno in _NO_SYNC:
            return
        if isinstance(file.name, str | Path):
            raise _named(error, Path(file.name)) from error
        raise


def prove(path: Path) -> None:
    """Make the name ``path``, which is in place, durable. Raises Unproved."""
    try:
        sync_folder(path.parent)
    except OSError as error:
        why = f"{os.strerror(error.errno or 0)} (it is in place, but a power loss may undo it)"
        raise Unproved(error.errno, why, str(path)) from error


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Create ``folder`` and its missing parents durably; one that exists is proved again. Raises Unproved, OSError.

    A parent that this user may not list cannot be synced, and is left to the file system.
    """
    if not folder.parent.is_dir():
        make_folder(folder.parent)
    try:
        folder.mkdir(mode, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "a file, or a link to nothing, has this name", str(folder)) from None
    try:
        prove(folder)
    except Unproved as error:
        if error.errno != errno.EACCES:
            raise


def draft_of(path: Path) -> Path:
    """An unused name for a draft of ``path``."""
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid():x}.{secrets.token_hex(4)}{DRAFT}")


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file to write to, whose content replaces that of ``path`` at the end. Raises Unproved, OSError.

    After an exception inside, ``path`` is unchanged. A symbolic link is replaced, not followed.
    """
    draft = draft_of(path)
    try:
        with _created(draft, mode) as file:
            yield file
            sync(file)
        rename(draft, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename in (None, str(draft)):
            error.filename = str(path)
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    _remove_forgotten(path)
    prove(path)


def replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Have ``path`` contain ``content``. Raises Unproved, OSError."""
    with replacing(path, mode) as file:
        file.write(content)


def write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Create ``path``, a draft, with ``content``, not yet durable by its name. Raises OSError, also if it exists."""
    with _created(path, mode) as file:
        file.write(content)
        sync(file)


def move_into(draft: Path, folder: Path, last: str) -> None:
    """Move the files of the folder ``draft`` into ``folder``, synced, and ``last`` once the others are there.

    Raises Unproved, OSError. After an OSError the files that are new in ``folder`` have been removed again.
    """
    paths = sorted(draft.iterdir(), key=lambda path: (path.name == last, path.name))
    for path in paths:
        with open(path, "rb+") as file:
            sync(file)
    moved: list[Path] = []
    try:
        for path in paths:
            if path.name == last:
                sync_folder(folder)
            target = folder / path.name
            is_new = not os.path.lexists(target)
            rename(path, target)
            moved += [target] * is_new
    except OSError:
        for target in moved:
            with suppress(OSError):
                target.unlink()
        raise
    prove(folder / last)


def create(path: Path, content: bytes, link: Link = os.link, mode: int = 0o644) -> bool:
    """Create ``path`` with ``content``; False if it existed. Exactly one of several processes succeeds.

    Raises Unproved if this call created it. After any other OSError it is unknown whether this call did. The error of
    ``link`` is raised on a file system without hard links.
    """
    draft = draft_of(path)
    try:
        write(draft, content, mode)
        done = linked(draft, path, link)
        _remove_forgotten(path)
    except OSError as error:
        if error.filename in (None, str(draft)):
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    if done:
        prove(path)
    return done


def linked(draft: Path, path: Path, link: Link = os.link) -> bool:
    """Give ``draft`` the name ``path`` too; False if that exists. Raises OSError.

    The answer to a link that was made may be lost (open(2), O_EXCL, on NFS); the number of links tells.
    """
    try:
        link(draft, path)
    except FileExistsError:
        return draft.stat().st_nlink == 2
    except OSError:
        if draft.stat().st_nlink != 2:
            raise
    return True


def append(path: Path, line: bytes, write: Callable[[int, bytes], int] = os.write) -> None:
    """Append ``line``, which ends in a newline, to ``path``: all of it or nothing. Raises OSError.

    What a crash has cut off before it becomes a line of its own.
    """
    with open(path, "ab+", buffering=0) as file:
        descriptor = file.fileno()
        end = os.lseek(descriptor, 0, os.SEEK_END)
        broken = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        content = b"\n" * broken + line
        try:
            if write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                with suppress(OSError):
                    os.ftruncate(descriptor, end)
                raise _named(error, path) from error
    sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Rename a file, not yet durably. Raises OSError if it has not been done.

    The answer to a rename that was made may be lost; the inode of the target tells.
    """
    moved = source.lstat()
    try:
        os.rename(source, target)
    except OSError:
        try:
            found = target.lstat()
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (moved.st_dev, moved.st_ino):
            raise


@contextmanager
def _created(path: Path, mode: int) -> Iterator[BinaryIO]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, mode), "wb") as file:
        yield file


def _remove_forgotten(path: Path) -> None:
    """Remove the drafts of ``path`` that dead processes have left, as far as possible."""
    remove_forgotten(path.parent, f".{path.name}.", path)


def remove_forgotten(folder: Path, prefix: str = ".", written: Path | None = None) -> None:
    """Remove drafts in ``folder`` that dead processes have left, as far as possible.

    Their names begin with ``prefix``. ``written``, now, or else the clock of this machine, tells how old they are.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        drafts = [entry for entry in entries if entry.name.startswith(prefix) and entry.name.endswith(DRAFT)]
        if drafts:
            now = written.lstat().st_mtime if written is not None else time.time()
            for entry in drafts:
                status = entry.stat(follow_symlinks=False)
                is_old = now - status.st_mtime > FORGOTTEN_S
                if stat.S_ISREG(status.st_mode) and (is_old or _is_dead(entry.name)):
                    Path(entry.path).unlink()


@cache
def _machine() -> str:
    """This boot of this machine, with its space of process numbers; "" if that is not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        return f"{zlib.crc32(boot + str(os.stat('/proc/self/ns/pid').st_ino).encode()):08x}"  # noqa: PTH116  # a link
    return ""


def _is_dead(draft: str) -> bool:
    """Whether the draft of this name is that of a process here that has ended."""
    machine, _, process = draft.removesuffix(DRAFT).rpartition(".")[0].rpartition(".")[2].partition("-")
    if not machine or machine != _machine():
        return False
    try:
        os.kill(int(process, 16), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return False


def is_named(path: Path, descriptor: int) -> bool:
    """Whether ``path`` is the open file: another program may have moved it away or put another in its place."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _named(error: OSError, path: Path) -> OSError:
    """The error of a call with a descriptor, which names no file."""
    return OSError(error.errno, os.strerror(error.errno or 0), str(path))
