"""What a checkpoint holds, and whether it still does: names, sizes, and a digest of each file's beginning and end."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATE = "trainer_state.json"
"""What transformers writes last into a checkpoint."""
ENDS = 1 << 16
"""Bytes of the beginning and of the end of a file that are compared, besides its size."""
SKIPPED = ("awaiting-evaluation", "README.md")
NAMED = 3
Contents = Mapping[str, list[Any]]


def contents(folder: Path) -> dict[str, list[Any]]:
    """Size and digest of each file below ``folder``, those that cannot be read left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in SKIPPED and (mark := _mark(path)) is not None:
            found[path.relative_to(folder).as_posix()] = mark
    return found


def _mark(path: Path) -> list[Any] | None:
    try:
        with path.open("rb") as file:  # opening it asks a network file system for its size anew
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.blake2b(file.read(ENDS), digest_size=8)
            file.seek(max(0, size - ENDS))
            digest.update(file.read(ENDS))
    except OSError:
        return None
    return [size, digest.hexdigest()]


def faults(folder: Path, before: Contents | None) -> str:
    """What ``folder`` lacks of what it held ``before``, or of what any checkpoint needs; "" if nothing."""
    if not folder.is_dir():
        return "it is not there"
    wrong = _differences(folder, before) if before else []
    wrong = wrong or _unreadable(folder)
    more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    return ", ".join(wrong[:NAMED]) + more


def _differences(folder: Path, before: Contents) -> list[str]:
    found = []
    for name, mark in before.items():
        now = _mark(folder / name)
        if now is None:
            found.append(f"{name} is missing" if not (folder / name).exists() else f"{name} cannot be read")
        elif now[0] != mark[0]:
            found.append(f"{name} has {now[0]} bytes instead of {mark[0]}")
        elif now != list(mark):
            found.append(f"{name} has changed")
    return found


def _unreadable(folder: Path) -> list[str]:
    """Of a checkpoint without a record: a state, whole safetensors, and the shards of an index."""
    found = [] if _json(folder / STATE) is not None else [f"{STATE} is missing or damaged"]
    found += [f"{path.name} is cut off" for path in sorted(folder.glob("*.safetensors")) if not _is_whole(path)]
    for index in folder.glob("*.index.json"):
        shards = set((_json(index) or {}).get("weight_map", {}).values())
        found += [f"{name} is missing" for name in sorted(shards) if not (folder / name).is_file()]
    return found


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_whole(path: Path) -> bool:
    """Whether the file is as long as its header says."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length < size:
                return False
            header = json.loads(file.read(length))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
    return bool(size == 8 + length + max(ends, default=0))
