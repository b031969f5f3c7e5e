"""Growing files of JSON lines: new lines, and the positions up to which they have been read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Positions = dict[str, int]
"""Bytes read, by file name."""


def new_lines(path: Path, positions: Positions) -> Iterator[Line]:
    """The complete lines of ``path`` after its position, which advances with each.

    Lines that are not JSON objects are skipped: two writers on a network file system, a full disk or a power loss can
    leave them. A file that cannot be read has no lines; one that has shrunk is read from its beginning.
    """
    with suppress(OSError), open(path, "rb") as file:
        at = positions.get(path.name, 0)
        positions[path.name] = at if at <= os.fstat(file.fileno()).st_size else 0
        file.seek(positions[path.name])
        for content in file:
            if not content.endswith(b"\n"):  # being written
                return
            positions[path.name] += len(content)
            with suppress(ValueError):
                line = json.loads(content)
                if isinstance(line, dict):
                    yield line


def read_positions(path: Path) -> Positions:
    """The positions stored by an earlier start; empty without any."""
    with suppress(OSError, ValueError):
        positions: Positions = json.loads(path.read_text(encoding="utf-8"))
        return positions
    return {}


def write_positions(path: Path, positions: Positions) -> None:
    """Store the positions. If the disk is full, the next start reads the lines again."""
    with suppress(OSError):
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(positions), encoding="utf-8")
        draft.replace(path)
