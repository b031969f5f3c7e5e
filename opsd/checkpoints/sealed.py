"""Small JSON documents with a checksum of themselves. Standard library only.

Many processes write to their folders, so readers must expect anything. Special files are not opened, files that are too
long are not read, and changed documents are rejected.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Never

CHECKSUM = "checksum"


class Damaged(ValueError):
    """There is no document, or it was changed; the message is the predicate of a sentence about it."""


def seal(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` as it will be read back, with a checksum. Raises Damaged if JSON cannot represent it."""
    plain = json.loads(_text(raw))
    return {**plain, CHECKSUM: _checksum(plain)}


def unseal(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The document without its checksum. Raises Damaged if the checksum does not match."""
    rest = dict(raw)
    if rest.pop(CHECKSUM, None) != _checksum(rest):
        raise Damaged("does not match the checksum of itself")
    return rest


def parse(content: bytes) -> dict[str, Any]:
    """The JSON object in ``content``. Raises Damaged."""
    try:
        raw = json.loads(content, parse_constant=_no_number)
    except RecursionError:
        raise Damaged("is nested too deeply") from None
    except ValueError as error:
        raise Damaged(f"is no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise Damaged(f"is a JSON {type(raw).__name__} and no object")
    return raw


def read_regular(path: str | Path, limit: int, folder: int | None = None) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; ``path`` is below the descriptor ``folder`` if given.

    Links are not followed and pipes are not waited for. Raises Damaged for anything else, OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENXIO or (error.errno == errno.ELOOP and _is_link(path, folder)):
            raise Damaged("is no regular file") from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Damaged("is no regular file")
        if found.st_size > limit:
            raise Damaged(f"has {found.st_size} bytes, more than {limit}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def _is_link(path: str | Path, folder: int | None) -> bool:
    return stat.S_ISLNK(os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode)


def _checksum(plain: Mapping[str, Any]) -> str:
    return f"blake2b_128:{blake2b(_text(plain).encode(), digest_size=16).hexdigest()}"


def _text(raw: Mapping[str, Any]) -> str:
    try:
        return json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Damaged(f"cannot be written as JSON: {error}") from error


def _no_number(name: str) -> Never:
    raise ValueError(f"{name} is no number")
