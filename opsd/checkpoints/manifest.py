"""The checkpoint manifest: what a checkpoint consists of, readable without torch.

A run's checkpoint folder holds one folder per step, ``step-000000000100/``, with the files that the trainer's
ranks wrote and, once all of them are durable, ``manifest.json``. The checkpoint exists from the moment that the
manifest is renamed into place (file and folder synced), and not before. A checkpoint found damaged later is set
aside by renaming its manifest to ``manifest.json.rejected``, so it no longer exists and nothing is deleted.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

MANIFEST = "manifest.json"
REJECTED = "manifest.json.rejected"
FORMAT = 1
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""What file systems without hard links answer (link(2))."""
_FOLDER = re.compile(r"step-(\d{12})")
_BLOCK = 1 << 22


class CheckpointError(Exception):
    """A checkpoint that must not be loaded; ``file`` is the part that is wrong."""

    def __init__(self, message: str, file: str = "") -> None:
        super().__init__(message)
        self.file = file


class Unreadable(CheckpointError):
    """A checkpoint that cannot be read from here and now, which does not mean that it is damaged."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint: name relative to its folder, bytes, ``algorithm:hexdigest`` over the content."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """``step`` is the last completed step, ``sample`` the global index of the next sequence to train on.

    ``layout`` is the parallel layout that wrote the files, for instance ``{"dp": 2}``; ``config_digest`` identifies
    what the state belongs to: the model, the seed, the length of sequences, and which data came in which order;
    ``tier`` is where the files lie: memory, partner (the memory of another node), local, remote.
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
    """The step of the checkpoint whose folder has this name; None if it is none."""
    match = _FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def checksum(path: Path) -> str:
    """``xxh3_128:`` and the hex digest of the file. Detects damage, does not authenticate. Raises OSError."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return f"xxh3_128:{digest.hexdigest()}"


def sync_folder(path: Path) -> None:
    """Make the names inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(folder: Path, manifest: Manifest) -> None:
    """Make the checkpoint in ``folder`` exist.

    Its files must already be synced. Raises OSError; then it does not exist. FileExistsError: another start of the run
    has committed this step, and its checkpoint stays.
    """
    draft, target = folder / f".{MANIFEST}.{os.getpid()}", folder / MANIFEST
    try:
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(asdict(manifest), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)
        _rename_new(draft, target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    try:
        sync_folder(folder)
        sync_folder(folder.parent)
    except OSError:
        target.unlink(missing_ok=True)
        raise


def _rename_new(draft: Path, target: Path) -> None:
    """Rename ``draft``. Raises FileExistsError if there is a ``target``, also if it has appeared just now."""
    try:
        os.link(draft, target)
    except FileExistsError:
        if draft.stat().st_nlink != 2:  # else an NFS server was told twice to make this link
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from error
        os.rename(draft, target)
        return
    draft.unlink()


def read(folder: Path, name: str = MANIFEST) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    ``name`` is that of a manifest that has been set aside. Raises CheckpointError if it makes no sense, Unreadable if
    there is none or the storage fails.
    """
    path = folder / name
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unreadable(f"{folder} has no {MANIFEST}: the checkpoint was never completed", MANIFEST) from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}", MANIFEST) from error
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}", MANIFEST) from error
    try:
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {raw['format']}, this opsd reads format {FORMAT}", MANIFEST)
        files = tuple(FileEntry(str(f["name"]), int(f["size"]), str(f["checksum"])) for f in raw.pop("files"))
        manifest = Manifest(files=files, **raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint manifest: {error!r}", MANIFEST) from error
    if any(Path(entry.name).name != entry.name for entry in files):
        raise CheckpointError(f"{path} names files outside its folder", MANIFEST)
    return manifest


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
    """Steps of the checkpoints that exist under ``root``, oldest first. A missing folder has none."""
    return sorted(step for step, folder in folders(root) if (folder / MANIFEST).exists())


def reject(folder: Path) -> None:
    """Set a damaged checkpoint aside: it no longer exists, its files stay for the post-mortem. Raises OSError."""
    os.rename(folder / MANIFEST, folder / REJECTED)
    sync_folder(folder)


def folders(root: Path) -> Iterator[tuple[int, Path]]:
    """Step and path of every checkpoint folder under ``root``, complete or not, in no order."""
    if not root.is_dir():
        return
    for path in root.iterdir():
        if (step := step_of(path.name)) is not None:
            yield step, path
