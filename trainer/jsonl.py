"""Files of JSON lines that grow: what is new in them, and up to where they have been read, for the next start."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Positions = dict[str, int]
"""By the name of a file, how many bytes of it have been read."""


def new_lines(path: Path, positions: Positions) -> Iterator[Line]:
    """The whole lines of ``path`` after its position, which moves on with each.

    Passed over are lines that are no JSON objects, as two writers on a network file system, a full disk or a loss of
    power leave them. A file that cannot be read has none, one that has become shorter is read from its beginning.
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
    """What an earlier start has remembered; nothing if it has not."""
    with suppress(OSError, ValueError):
        positions: Positions = json.loads(path.read_text(encoding="utf-8"))
        return positions
    return {}


def write_positions(path: Path, positions: Positions) -> None:
    """Remember what has been read. On a full disk it is read again by the next start."""
    with suppress(OSError):
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(positions), encoding="utf-8")
        draft.replace(path)
