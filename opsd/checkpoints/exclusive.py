"""Creating a file such that exactly one of several processes succeeds, on any file system.

The content is written durably under another name and then linked to the target, link(2), which fails if the target
exists. Without links, a folder with the content in it is renamed to the target, rename(2), which fails if the target is
a file or a folder that is not empty; so both ways exclude each other. Standard library only.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CONTENT = "claim.json"
"""The file in a target that is a folder."""
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links (link(2))."""
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""Errors of renaming a folder to an existing target (rename(2))."""
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

Link = Callable[[Path, Path], None]
"""Makes a hard link, as ``os.link`` does."""


def tried(target: Path, link: Link = os.link) -> str:
    """Which way excludes a second creation of ``target``: "link", "rename", or "" if neither does.

    ``target`` does not exist before and after. Raises OSError.
    """
    drafts = [draft_in(target.parent), draft_in(target.parent)]
    try:
        for draft in drafts:
            _write(draft, b"{}\n")
        made = [_link(draft, target, link) for draft in drafts]
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        made = []
    finally:
        for path in (*drafts, target):
            path.unlink(missing_ok=True)
    if made == [True, False]:
        return "link"
    try:
        return "rename" if _put_folder(b"{}\n", target) and not _put_folder(b"{}\n", target) else ""
    finally:
        remove_folder(target)


def put(content: bytes, target: Path, link: Link = os.link) -> bool:
    """Create ``target`` durably; False if it existed. Raises OSError if the result is unknown."""
    draft = draft_in(target.parent)
    try:
        _write(draft, content)
        done = _link(draft, target, link)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        done = _put_folder(content, target)
    finally:
        draft.unlink(missing_ok=True)
    sync(target.parent)
    return done


def draft_in(folder: Path) -> Path:
    """An unused name in ``folder``."""
    return folder / f".{os.uname().nodename}.{secrets.token_hex(8)}"


def sync(folder: Path) -> None:
    """Make the names in ``folder`` durable, if the file system supports it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Remove a target that is a folder. Raises OSError, also if something else is in it."""
    with suppress(FileNotFoundError, NotADirectoryError):
        (folder / CONTENT).unlink(missing_ok=True)
        folder.rmdir()


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _link(draft: Path, target: Path, link: Link) -> bool:
    try:
        link(draft, target)
    except FileExistsError:
        # Over NFS the answer to a link that was made may be lost; the number of links tells (open(2), O_EXCL).
        return draft.stat().st_nlink == 2
    except OSError:
        if draft.stat().st_nlink != 2:
            raise
    return True


def _put_folder(content: bytes, target: Path) -> bool:
    draft = target.with_name(f"{draft_in(target.parent).name}.d")
    draft.mkdir()
    try:
        _write(draft / CONTENT, content)
        sync(draft)
        draft.rename(target)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    finally:
        remove_folder(draft)
    return True
