"""The newest staged state of each rank in the node's shared memory, where it outlives the rank. Torch-free.

For each rank there are, beside the rank pages of a run, ``rank-0000.state``, laid out as its checkpoint file, and
``rank-0000.state.json``, its metadata. The metadata is removed before the state changes and written once the state is
complete, so a state with metadata is whole, and its checksum verifies it. The states of all ranks form a checkpoint if
they are of the same save of the same start of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_origin, get_type_hints

import xxhash

from opsd.checkpoints.manifest import FileEntry, Manifest
from opsd.checkpoints.sealed import Damaged, parse, read_regular

TIER, PARTNER = "memory", "partner"
"""The place of a state: the memory of its rank's node, or of another node."""
_BLOCK = 1 << 24
_LONGEST = 1 << 16
"""Largest metadata file, in bytes."""


@dataclass(frozen=True, slots=True)
class StateInfo:
    """The metadata of a staged state. ``digest`` identifies model and data, ``attempt`` the start of the run."""

    rank: int
    step: int
    sample: int
    digest: str
    attempt: str
    layout: dict[str, int]
    size: int
    checksum: str
    run: str
    created: float

    @classmethod
    def parse(cls, content: bytes) -> StateInfo:
        """The metadata in ``content``, JSON. Raises Damaged if it is invalid."""
        raw = parse(content)
        kinds = get_type_hints(cls)
        if raw.keys() != kinds.keys():
            raise Damaged("has other fields than a record of a state")
        for name, kind in kinds.items():
            value = raw[name]
            is_right = isinstance(value, get_origin(kind) or kind) and not isinstance(value, bool)
            if not is_right or (kind is int and not 0 <= value < 1 << 63):
                raise Damaged(f"has a {name} that is none")
        return cls(**raw)

    @property
    def save(self) -> int:
        """A positive 62-bit number that is the same for all states of one save, and differs between saves."""
        text = json.dumps([self.step, self.sample, self.digest, self.attempt, self.layout])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2 | 1


def state_path(folder: Path, rank: int) -> Path:
    """The file of the staged state of ``rank``."""
    return folder / f"rank-{rank:04d}.state"


def info_path(folder: Path, rank: int) -> Path:
    """The file of its metadata."""
    return folder / f"rank-{rank:04d}.state.json"


def open_state(folder: Path, rank: int, size: int) -> int:
    """A descriptor of the state of ``rank`` with room for ``size`` bytes; existing metadata stays valid.

    A state of another size is replaced, not resized, since a process may still be reading it. Raises OSError, for
    instance if shared memory is full.
    """
    path = state_path(folder, rank)
    with suppress(FileNotFoundError):
        if path.lstat().st_size != size:
            forget(folder, rank)
            path.unlink()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return descriptor


def write_info(folder: Path, info: StateInfo) -> None:
    """Declare the state of ``info.rank`` complete. Raises OSError."""
    path = info_path(folder, info.rank)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(asdict(info)), encoding="utf-8")
    draft.replace(path)


def read_info(folder: Path, rank: int) -> StateInfo | None:
    """The metadata of ``rank``, None if it is missing or invalid."""
    try:
        info = StateInfo.parse(read_regular(info_path(folder, rank), _LONGEST))
        is_of_it = info.rank == rank and state_path(folder, rank).stat().st_size == info.size
    except (OSError, Damaged):
        return None
    return info if is_of_it else None


def forget(folder: Path, rank: int) -> None:
    """Invalidate the state of ``rank`` before it changes."""
    info_path(folder, rank).unlink(missing_ok=True)


def remove(folder: Path, rank: int) -> None:
    """Free the memory of ``rank``."""
    forget(folder, rank)
    state_path(folder, rank).unlink(missing_ok=True)


def keep_only(folder: Path, ranks: Collection[int]) -> None:
    """Free the memory of all other ranks, which this node had before the run moved to other nodes."""
    for path in folder.glob("rank-*.state"):
        number = path.name.removeprefix("rank-").removesuffix(".state")
        if number.isdigit() and int(number) not in ranks:
            remove(folder, int(number))


def all_infos(folder: Path) -> Iterator[StateInfo]:
    """The metadata of all states on this node, by rank."""
    for path in sorted(folder.glob("rank-*.state.json")):
        number = path.name.removeprefix("rank-").partition(".")[0]
        info = read_info(folder, int(number)) if number.isdigit() else None
        if info is not None:
            yield info


def infos_of(folder: Path, save: int) -> Iterator[StateInfo]:
    """The metadata of the states of one save."""
    return (info for info in all_infos(folder) if info.save == save)


def manifest_of(found: list[StateInfo]) -> Manifest:
    """The checkpoint formed by ``found``, the states of one save."""
    first = found[0]
    files = tuple(FileEntry(f"rank-{info.rank:04d}.state", info.size, info.checksum) for info in found)
    return Manifest(first.step, first.sample, first.layout, first.digest, files, TIER, first.created, first.run)


def checksum(view: memoryview) -> str:
    """The checksum of a state, in the format of manifests."""
    digest = xxhash.xxh3_128()
    for at in range(0, len(view), _BLOCK):
        digest.update(view[at : at + _BLOCK])
    return f"xxh3_128:{digest.hexdigest()}"
