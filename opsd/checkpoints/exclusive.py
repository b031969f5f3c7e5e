"""Creating a file such that exactly one of several processes succeeds, on any file system.

The content is written durably under another name and then linked to the target, link(2), which fails if the target
exists. Without links, a folder with the content in it is renamed to the target. rename(2) fails if the target is a file
or a folder that is not empty, so both ways exclude each other.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from opsd.durable import FORGOTTEN_S, NO_LINKS, Link, linked, sync_folder, write

CONTENT = "claim.json"
"""The file in a target that is a folder."""
_DRAFT = re.compile(r"\..+\.[0-9a-f]{16}")
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""Errors of renaming a folder to an existing target (rename(2))."""


def tried(target: Path, link: Link = os.link) -> str:
    """Which way excludes a second creation of ``target``: "link", "rename", or "" if neither does.

    ``target`` does not exist before and after. Raises OSError.
    """
    drafts = [draft_in(target.parent), draft_in(target.parent)]
    try:
        for draft in drafts:
            write(draft, b"{}\n")
        made = [linked(draft, target, link) for draft in drafts]
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
        write(draft, content)
        done = linked(draft, target, link)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        done = _put_folder(content, target)
    finally:
        draft.unlink(missing_ok=True)
    _remove_forgotten(target)
    sync_folder(target.parent)
    return done


def _remove_forgotten(target: Path) -> None:
    """Remove drafts beside ``target`` that were not removed at the time, as far as possible."""
    with suppress(OSError), os.scandir(target.parent) as entries:
        now = target.lstat().st_mtime
        for entry in entries:
            is_draft = _DRAFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            if is_draft and now - entry.stat(follow_symlinks=False).st_mtime > FORGOTTEN_S:
                Path(entry.path).unlink()


def draft_in(folder: Path) -> Path:
    """An unused name in ``folder``."""
    return folder / f".{os.uname().nodename}.{secrets.token_hex(8)}"


def remove_folder(folder: Path) -> None:
    """Remove a target that is a folder. Raises OSError, also if something else is in it."""
    with suppress(FileNotFoundError, NotADirectoryError):
        (folder / CONTENT).unlink(missing_ok=True)
        folder.rmdir()


def _put_folder(content: bytes, target: Path) -> bool:
    draft = target.with_name(f"{draft_in(target.parent).name}.d")
    draft.mkdir()
    try:
        write(draft / CONTENT, content)
        sync_folder(draft)
        draft.rename(target)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    finally:
        remove_folder(draft)
    return True
