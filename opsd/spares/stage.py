"""Copies shards to the node: in parallel, rate limited, resumable, and atomic per corpus.

A file is written as ``.NAME.part``, compared with its checksum, made durable, and then renamed. The index is renamed
last: until then the trainer ignores the folder, and the draft of the index lists what may be there. Memory use is one
block per file in flight.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from opsd import durable
from opsd.checkpoints.manifest import FileEntry
from opsd.durable import prove, rename, replace, sync_folder
from opsd.spares.transfer import (
    INDEX,
    Corpus,
    Folder,
    Progress,
    StageError,
    Storage,
    Transfer,
    Work,
    indexed,
    matches,
    open_file,
    part_of,
    reporting,
    size_of,
)
from opsd.words import size

LEFT_FREE = 0.02
"""Share of the disk that staging leaves free."""
DRAFT = f".{INDEX}.part"
DEFECTIVE = (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN)
"""Errors of reading a file that the disk has lost: from its driver, or from the file system's checksums."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Bytes of the files that were missing; ``compared`` if the content of all files was compared."""

    size: int
    compared: bool


def stage(storage: Storage, corpora: Sequence[Corpus], target: Path, work: Work) -> Staged:
    """Copy what ``target`` lacks of ``corpora``. Raises StageError, StorageError.

    A file with the right size under an unchanged index was compared when it was copied and is not read again;
    ``verify`` does that. Under a changed or missing index, existing files are compared first.
    """
    make_folder(target)
    with reporting(target), _alone(target):
        wanted = [(corpus, entry) for corpus in corpora for entry in corpus.files]
        for corpus in corpora:
            make_folder(target / corpus.folder)
            if not _same_index(target, corpus):
                (target / corpus.folder / INDEX).unlink(missing_ok=True)
        known = {corpus.folder for corpus in corpora if _same_index(target, corpus)}
        missing = [(c, e) for c, e in wanted if c.folder not in known or size_of(target / c.path(e)) != e.size]
        _check_space(target, missing)
        for corpus in corpora:
            if corpus.folder not in known:
                replace(target / corpus.folder / DRAFT, corpus.index)
        transfer = Transfer(work, Progress(sum(entry.size for _, entry in missing)))
        transfer.run(
            [
                partial(transfer.copy, storage, corpus.path(entry), target / corpus.path(entry), entry)
                for corpus, entry in missing
            ]
        )
        for corpus in corpora:
            folder = target / corpus.folder
            sync_folder(folder)
            if corpus.folder not in known:
                rename(folder / DRAFT, folder / INDEX)
                prove(folder / INDEX)
        return Staged(transfer.progress.total, not known)


def verify(corpora: Sequence[Corpus], target: Path, work: Work) -> list[str]:
    """Read every staged file again; returns what is missing or damaged, one sentence each. Raises StageError.

    A damaged file, or one on a damaged part of the disk, is removed, so that no run reads it and the next ``stage``
    copies it again.
    """
    bad: list[str] = []
    wanted = [(target / corpus.path(entry), entry) for corpus in corpora for entry in corpus.files]
    transfer = Transfer(work, Progress(sum(entry.size for _, entry in wanted)))

    def check(path: Path, entry: FileEntry) -> None:
        if (size := size_of(path)) != entry.size:
            bad.append(f"{path} is missing" if size is None else f"{path} has {size} bytes instead of {entry.size}")
            return
        try:
            with open_file(path, os.O_RDONLY) as file:
                digest = transfer.hash(file, work.rate_limit, entry)
            if not transfer.stop.is_set() and not matches(digest, entry):
                path.unlink()
                bad.append(f"{path} was damaged and has been removed")
        except OSError as error:
            removed = error.errno in DEFECTIVE and _removed(path)
            outcome = "cannot be read and has been removed" if removed else "cannot be read or removed"
            bad.append(f"{path} {outcome}: {error.strerror or error}")

    transfer.run([partial(check, path, entry) for path, entry in wanted])
    bad += [f"{target / c.folder / INDEX} is missing or another" for c in corpora if not _same_index(target, c)]
    return sorted(bad)


def make_folder(path: Path) -> None:
    """Create ``path`` and its parents. Raises StageError, also if it is a link or writable by other users."""
    try:
        durable.make_folder(path, mode=0o755)
        found = path.lstat()
    except OSError as error:
        raise StageError(
            f"{path} cannot be made: {error.strerror}; set spare.folder to a folder on local NVMe"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise StageError(f"{path} is a link; name the folder itself in spare.folder")
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
        raise StageError(f"{path} can be changed by other users; give it to root, without write permission for others")


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _check_space(target: Path, missing: Sequence[tuple[Corpus, FileEntry]]) -> None:
    disk = shutil.disk_usage(target)
    there = ((target / corpus.path(entry), entry.size) for corpus, entry in missing)
    begun = sum(min(size, size_of(path) or size_of(part_of(path)) or 0) for path, size in there)
    needed, free = sum(entry.size for _, entry in missing) - begun, disk.free - LEFT_FREE * disk.total
    if needed > max(free, 0.0):
        raise StageError(
            f"{target} has room for {size(max(free, 0.0))} and {size(needed)} are missing; "
            "make room, or set spare.folder to a larger disk"
        )


def _same_index(target: Path, corpus: Corpus) -> bool:
    path = target / corpus.folder / INDEX
    return size_of(path) == len(corpus.index) and path.read_bytes() == corpus.index


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Lock the folder against a second staging. Raises StageError."""
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise StageError(f"another `opsd spare stage` is writing to {target}; wait for it") from None
    finally:
        os.close(descriptor)


def remove(target: Path) -> int:
    """Delete the staged files under ``target`` that its indexes list; returns the bytes freed.

    This includes the files of an unfinished staging. Raises StageError, StorageError.
    """
    if not target.is_dir():
        return 0
    make_folder(target)
    freed, storage = 0, Folder(target)
    with reporting(target), _alone(target):
        for corpus in indexed(storage, INDEX):
            folder = target / corpus.folder
            rename(folder / INDEX, folder / DRAFT)
        for corpus in indexed(storage, DRAFT):
            folder = target / corpus.folder
            files = [folder / entry.name for entry in corpus.files]
            for path in (*files, *map(part_of, files)):
                freed += size_of(path) or 0
                path.unlink(missing_ok=True)
            (folder / DRAFT).unlink()
    return freed
