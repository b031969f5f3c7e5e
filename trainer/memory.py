"""The newest staged state of each rank in the node's shared memory, where it survives the rank. Torch-free.

Beside the rank pages of a run lie, for each rank, ``rank-0000.state``, laid out as its checkpoint file, and
``rank-0000.state.json``, a record of what it is. The record is removed before the state is touched and written once it
is complete, so a state with a record is whole, and its checksum proves it. The states of all ranks together are a
checkpoint if they are of one save of one start of the run.
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
"""Where a state was: in the memory of the node of its rank, or of another."""
_BLOCK = 1 << 24
_LONGEST = 1 << 16
"""Of a record, in bytes."""


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What a staged state is. ``digest`` says what it belongs to, ``attempt`` which start of the run made it."""

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
        """The record that ``content``, JSON, holds. Raises Damaged if it makes no sense."""
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
        """A positive 62-bit number that the records of one save have in common, and those of no other."""
        text = json.dumps([self.step, self.sample, self.digest, self.attempt, self.layout])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2 | 1


def state_path(folder: Path, rank: int) -> Path:
    """The staged state of ``rank``."""
    return folder / f"rank-{rank:04d}.state"


def info_path(folder: Path, rank: int) -> Path:
    """Its record."""
    return folder / f"rank-{rank:04d}.state.json"


def open_state(folder: Path, rank: int, size: int) -> int:
    """A descriptor of the state of ``rank`` with room for ``size`` bytes; a record that is there stays true.

    A state of another size is replaced and not resized, since a process may still be reading it. Raises OSError, for
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
    """Declare the state of ``info.rank`` whole. Raises OSError."""
    path = info_path(folder, info.rank)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(asdict(info)), encoding="utf-8")
    draft.replace(path)


def read_info(folder: Path, rank: int) -> StateInfo | None:
    """The record of ``rank``, None if there is none that makes sense."""
    try:
        info = StateInfo.parse(read_regular(info_path(folder, rank), _LONGEST))
        is_of_it = info.rank == rank and state_path(folder, rank).stat().st_size == info.size
    except (OSError, Damaged):
        return None
    return info if is_of_it else None


def forget(folder: Path, rank: int) -> None:
    """The state of ``rank`` is about to change."""
    info_path(folder, rank).unlink(missing_ok=True)


def remove(folder: Path, rank: int) -> None:
    """Give the memory of ``rank`` back."""
    forget(folder, rank)
    state_path(folder, rank).unlink(missing_ok=True)


def keep_only(folder: Path, ranks: Collection[int]) -> None:
    """Give back the memory of all other ranks, which this node had before the run went on with other nodes."""
    for path in folder.glob("rank-*.state"):
        number = path.name.removeprefix("rank-").removesuffix(".state")
        if number.isdigit() and int(number) not in ranks:
            remove(folder, int(number))


def all_infos(folder: Path) -> Iterator[StateInfo]:
    """What the memory of this node holds, by rank."""
    for path in sorted(folder.glob("rank-*.state.json")):
        number = path.name.removeprefix("rank-").partition(".")[0]
        info = read_info(folder, int(number)) if number.isdigit() else None
        if info is not None:
            yield info


def infos_of(folder: Path, save: int) -> Iterator[StateInfo]:
    """Those that belong to one save."""
    return (info for info in all_infos(folder) if info.save == save)


def manifest_of(found: list[StateInfo]) -> Manifest:
    """The checkpoint that ``found``, the records of one save, make up."""
    first = found[0]
    files = tuple(FileEntry(f"rank-{info.rank:04d}.state", info.size, info.checksum) for info in found)
    return Manifest(first.step, first.sample, first.layout, first.digest, files, TIER, first.created, first.run)


def checksum(view: memoryview) -> str:
    """The checksum of a state, as manifests have it."""
    digest = xxhash.xxh3_128()
    for at in range(0, len(view), _BLOCK):
        digest.update(view[at : at + _BLOCK])
    return f"xxh3_128:{digest.hexdigest()}"
