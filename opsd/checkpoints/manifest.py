"""The checkpoint manifest: what a checkpoint consists of, readable without torch.

A run's checkpoint folder has one folder per step, ``step-000000000100/``, with the files of the trainer's ranks and,
once all of them are durable, ``manifest.json``. The checkpoint exists from the moment the manifest is renamed into
place (file and folder synced). A checkpoint that is found damaged later is set aside by renaming its manifest to
``manifest.json.rejected``: it no longer exists, and nothing is deleted.

A manifest has a checksum of itself since format 2. One of format 1 has none: a flipped bit in it may go unnoticed.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from opsd import durable
from opsd.checkpoints.sealed import Damaged, parse, read_regular, seal, unseal
from opsd.durable import NO_LINKS, create, sync_folder
from opsd.durable import replace as replace_file

MANIFEST = "manifest.json"
REJECTED = "manifest.json.rejected"
FORMAT = 2
_UNSEALED = 1
MAX_BYTES = 64 << 20
"""A manifest of 100,000 ranks has about twenty million."""
_MOST = (1 << 63) - 1
_FIELDS = {"step", "sample", "layout", "config_digest", "files", "tier", "created", "run", "format"}
_CHECKSUM = re.compile(r"xxh3_128:[0-9a-f]{32}")
_FOLDER = re.compile(r"step-([0-9]{12})")
_BLOCK = 1 << 22


class CheckpointError(Exception):
    """A checkpoint that must not be loaded; ``file`` is the damaged part."""

    def __init__(self, message: str, file: str = "") -> None:
        super().__init__(message)
        self.file = file


class Unreadable(CheckpointError):
    """A checkpoint that cannot be read here and now; it need not be damaged."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint: name relative to its folder, bytes, ``algorithm:hexdigest`` over the content."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """``step`` is the last completed step, ``sample`` the global index of the next sequence to train on.

    ``layout`` is the parallel layout that wrote the files, for instance ``{"dp": 2}``. ``config_digest`` identifies
    what the state depends on: the model, the seed, the sequence length, and the order of the data. ``tier`` is where
    the files are: memory, partner (the memory of another node), local, remote.
    """

    step: int
    sample: int
    layout: dict[str, int]
    config_digest: str
    files: tuple[FileEntry, ...]
    tier: str
    created: float
    run: str = ""
    format: int = FORMAT


def folder_of(root: Path, step: int) -> Path:
    """The folder of the checkpoint of ``step``."""
    return root / f"step-{step:012d}"


def step_of(name: str) -> int | None:
    """The step of the checkpoint whose folder has this name; None for other names."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def checksum(path: Path) -> str:
    """``xxh3_128:`` and the hex digest of the file. Detects damage, not tampering. Raises OSError."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return f"xxh3_128:{digest.hexdigest()}"


def commit(folder: Path, manifest: Manifest) -> None:
    """Make the checkpoint in ``folder`` exist.

    Its files must be synced. Raises Unproved: it exists, and ``prove`` has to be called until it succeeds.
    FileExistsError: another checkpoint of this step was committed, and stays. After any other OSError it may exist.
    """
    sync_folder(folder)
    target = folder / MANIFEST
    try:
        created = create(target, encode(manifest))
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        created = not target.exists()
        if created:
            replace_file(target, encode(manifest))
    if not created:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    durable.prove(folder)


def prove(folder: Path) -> None:
    """Make the committed checkpoint in ``folder`` durable, if that was not confirmed. Raises Unproved."""
    durable.prove(folder / MANIFEST)
    durable.prove(folder)


def encode(manifest: Manifest) -> bytes:
    """The content of a manifest file."""
    return json.dumps(seal(asdict(replace(manifest, format=FORMAT))), indent=1).encode()


def decode(content: bytes, place: str, step: int | None = None) -> Manifest:
    """The manifest in ``content``, the file at ``place``, which must be of ``step`` if that is given.

    Raises CheckpointError if it is invalid, Unreadable if a newer opsd wrote it.
    """
    try:
        raw = parse(content)
        form: Any = raw.get("format")
        if not _is_count(form, 1):
            raise Damaged(f"has the format {form!r:.40}")
        if form != _UNSEALED:
            raw = unseal(raw)
        if form > FORMAT:
            raise Unreadable(f"{place} has format {form}, this opsd reads formats 1 to {FORMAT}", MANIFEST)
        manifest = _manifest(raw)
        if step not in (None, manifest.step):
            raise Damaged(f"is of step {manifest.step}, not {step}")
    except Damaged as damage:
        raise CheckpointError(f"{place} {damage}", MANIFEST) from damage
    return manifest


def _manifest(raw: Mapping[str, Any]) -> Manifest:
    """Raises Damaged."""
    if odd := (raw.keys() ^ _FIELDS) - {"run"}:
        raise Damaged(f"{'lacks' if odd & _FIELDS else 'has the unknown'} field {min(odd)!r:.40}")
    for name in ("config_digest", "tier", "run"):
        if not isinstance(raw.get(name, ""), str):
            raise Damaged(f"has a {name} that is no text")
    for name in ("step", "sample"):
        if not _is_count(raw[name]):
            raise Damaged(f"has a {name} that is no number of {name}s")
    layout, created = raw["layout"], raw["created"]
    if not (isinstance(layout, dict) and all(_is_count(size, 1) for size in layout.values())):
        raise Damaged("has a layout that is none")
    if isinstance(created, bool) or not isinstance(created, int | float) or not 0 <= created <= _MOST:
        raise Damaged("was created at no time")
    return Manifest(**{**raw, "files": _files(raw["files"])})


def _files(raw: Any) -> tuple[FileEntry, ...]:
    """Raises Damaged."""
    if not isinstance(raw, list) or not raw:
        raise Damaged("names no files")
    names = set()
    for entry in raw:
        if not isinstance(entry, dict) or entry.keys() != {"name", "size", "checksum"}:
            raise Damaged("has a file that is not a name, a size and a checksum")
        name, size, digest = entry["name"], entry["size"], entry["checksum"]
        if not isinstance(name, str) or not _is_file_name(name):
            raise Damaged(f"names the file {name!r:.80}, which none inside its folder can have")
        if name in names:
            raise Damaged(f"names the file {name} twice")
        if not _is_count(size):
            raise Damaged(f"has a size of {name} that is no number of bytes")
        if not isinstance(digest, str) or not _CHECKSUM.fullmatch(digest):
            raise Damaged(f"has a checksum of {name} that is none")
        names.add(name)
    return tuple(FileEntry(**entry) for entry in raw)


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def _is_file_name(name: str) -> bool:
    is_special = name in ("", ".", "..") or name.startswith(MANIFEST)
    return not is_special and "/" not in name and name.isprintable() and len(name.encode()) <= 255


def read(folder: Path, name: str = MANIFEST) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    ``name`` is the file name of a manifest that was set aside. Raises CheckpointError if it is invalid, Unreadable if
    there is none or the storage fails.
    """
    path = folder / name
    try:
        content = read_regular(path, MAX_BYTES)
    except Damaged as damage:
        raise CheckpointError(f"{path} {damage}", MANIFEST) from damage
    except FileNotFoundError:
        raise Unreadable(f"{folder} has no {MANIFEST}: the checkpoint was never completed", MANIFEST) from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}", MANIFEST) from error
    return decode(content, str(path), step_of(folder.name))


def verify(folder: Path, part: int = 0, parts: int = 1) -> Manifest:
    """Read the manifest and check every file's size and checksum.

    ``parts`` readers share the work when each has its own ``part``, from 0 on. Raises CheckpointError naming the first
    bad file, Unreadable if the storage fails.
    """
    manifest = read(folder)
    for entry in manifest.files[part::parts]:
        path = folder / entry.name
        try:
            size = path.stat().st_size
            if size != entry.size:
                raise CheckpointError(f"{path} has {size} bytes, the manifest says {entry.size}", entry.name)
            if checksum(path) != entry.checksum:
                raise CheckpointError(f"{path} does not match its checksum", entry.name)
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing", entry.name) from None
        except OSError as error:
            raise Unreadable(f"{path} cannot be read: {error.strerror}", entry.name) from error
    return manifest


def steps(root: Path) -> list[int]:
    """Steps of the checkpoints that exist under ``root``, oldest first. A missing folder has none. Raises OSError."""
    return sorted(step for step, folder in folders(root) if is_there(folder))


def newest(root: Path) -> int | None:
    """The step of the newest checkpoint under ``root`` with a valid manifest.

    One that the storage fails to return counts: others may be able to read it. Raises OSError.
    """
    for step in reversed(steps(root)):
        try:
            read(folder_of(root, step))
        except Unreadable:
            return step
        except CheckpointError:
            continue
        return step
    return None


def is_there(folder: Path, name: str = MANIFEST) -> bool:
    """Whether ``folder`` has an entry ``name``, also if the storage only reports that it cannot be read."""
    try:
        os.lstat(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def reject(folder: Path) -> None:
    """Set a damaged checkpoint aside: it no longer exists, its files stay for the post-mortem. Raises OSError."""
    durable.rename(folder / MANIFEST, folder / REJECTED)
    sync_folder(folder)


def folders(root: Path) -> Iterator[tuple[int, Path]]:
    """Step and path of every checkpoint folder under ``root``, complete or not, in no order. Raises OSError."""
    try:
        found = os.scandir(root)
    except (FileNotFoundError, NotADirectoryError):
        return
    with found:
        for entry in found:
            if (step := step_of(entry.name)) is not None and _may_be_folder(entry):
                yield step, root / entry.name


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # it cannot be seen, which each use of it says for itself
        return True
