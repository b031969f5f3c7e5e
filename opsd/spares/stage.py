"""Copying shards to the node: many at once, at a bounded pace, resumed where it was cut off, whole or not at all.

A file is written as ``.NAME.part``, compared with its checksum, made durable, and only then renamed to its name. The
index gets its name last; until then the trainer takes nothing from this folder, and its draft says what may lie there.
Memory is a block per file that is being copied.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import xxhash

from opsd.checkpoints.manifest import FileEntry, sync_folder
from opsd.spares.corpus import INDEX, Corpus, indexed
from opsd.spares.rate_limit import RateLimit
from opsd.spares.storage import Folder, Storage, StorageError

BLOCK = 1 << 22
LEFT_FREE = 0.02
"""Share of the disk that staging leaves free."""
LOOK_S = 0.5
PREFIX = "xxh3_128:"
DRAFT = f".{INDEX}.part"
DEFECTIVE = (errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN)
"""What reading a file gives where the disk has lost it: by its driver, or by the file system's own checksums."""


class StageError(Exception):
    """Staging cannot be done; the message says why in one sentence. What was copied so far is kept and used again."""


@dataclass
class Progress:
    """Bytes of ``total`` that are done; counted by several threads."""

    total: int
    done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, size: int) -> None:
        """Count ``size`` bytes; negative for a file that is begun anew."""
        with self._lock:
            self.done += size


@dataclass(frozen=True, slots=True)
class Work:
    """How to copy or read: ``look`` is called with the progress about twice a second."""

    rate_limit: RateLimit
    parallel: int = 8
    look: Callable[[Progress], None] = lambda _progress: None


@dataclass(frozen=True, slots=True)
class Staged:
    """Bytes of the files that were missing; ``compared`` is True if the content of all files was compared."""

    size: int
    compared: bool


Task = Callable[[threading.Event], None]


def stage(storage: Storage, corpora: Sequence[Corpus], target: Path, work: Work) -> Staged:
    """Copy what ``target`` lacks of ``corpora``. Raises StageError, StorageError.

    A file that is there in its full size under the same index has been compared when it came and is not read again;
    ``verify`` does that. Under another index, or none yet, what lies there is compared first.
    """
    make_folder(target)
    with _alone(target), _reporting(target):
        wanted = [(corpus, entry) for corpus in corpora for entry in corpus.files]
        for corpus in corpora:
            make_folder(target / corpus.folder)
            if not _same_index(target, corpus):
                (target / corpus.folder / INDEX).unlink(missing_ok=True)
        known = {corpus.folder for corpus in corpora if _same_index(target, corpus)}
        missing = [(c, e) for c, e in wanted if c.folder not in known or _size(target / c.path(e)) != e.size]
        _check_space(target, missing)
        for corpus in corpora:
            if corpus.folder not in known:
                _write(target / corpus.folder / DRAFT, corpus.index)
        progress = Progress(sum(entry.size for _, entry in missing))

        def job(corpus: Corpus, entry: FileEntry) -> Task:
            source, path = corpus.path(entry), target / corpus.path(entry)
            return lambda stop: _copy(storage, source, path, entry, work.rate_limit, progress, stop)

        _all([job(corpus, entry) for corpus, entry in missing], work, progress)
        for corpus in corpora:
            folder = target / corpus.folder
            sync_folder(folder)
            if corpus.folder not in known:
                os.rename(folder / DRAFT, folder / INDEX)
                sync_folder(folder)
        return Staged(progress.total, not known)


def verify(corpora: Sequence[Corpus], target: Path, work: Work) -> list[str]:
    """Read every staged file again and say what is missing or damaged, a sentence each. Raises StageError.

    A copy that is damaged, or on a damaged part of the disk, is removed, so that no run reads it and the next ``stage``
    brings it anew.
    """
    bad: list[str] = []
    wanted = [(target / corpus.path(entry), entry) for corpus in corpora for entry in corpus.files]
    progress = Progress(sum(entry.size for _, entry in wanted))

    def check(path: Path, entry: FileEntry, stop: threading.Event) -> None:
        if (size := _size(path)) != entry.size:
            bad.append(f"{path} is missing" if size is None else f"{path} has {size} bytes instead of {entry.size}")
            return
        try:
            with _open(path, os.O_RDONLY) as file:
                digest = _hash(file, work.rate_limit, progress, stop)
            if not stop.is_set() and PREFIX + digest.hexdigest() != entry.checksum:
                path.unlink()
                bad.append(f"{path} was damaged and has been removed")
        except OSError as error:
            removed = error.errno in DEFECTIVE and _removed(path)
            outcome = "cannot be read and has been removed" if removed else "cannot be read or removed"
            bad.append(f"{path} {outcome}: {error.strerror or error}")

    def job(path: Path, entry: FileEntry) -> Task:
        return lambda stop: check(path, entry, stop)

    _all([job(path, entry) for path, entry in wanted], work, progress)
    bad += [f"{target / c.folder / INDEX} is missing or another" for c in corpora if not _same_index(target, c)]
    return sorted(bad)


def make_folder(path: Path) -> None:
    """Make ``path`` and those above it. Raises StageError, also if it is a link or another user could change it."""
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise StageError(
            f"{path} cannot be made: {error.strerror}; set spare.folder to a folder on local NVMe"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise StageError(f"{path} is a link; name the folder itself in spare.folder")
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
        raise StageError(f"{path} can be changed by other users; give it to root, without write permission for others")


def _all(jobs: Sequence[Task], work: Work, progress: Progress) -> None:
    """Run ``jobs`` in threads; the first exception stops the others and is raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(work.parallel, thread_name_prefix="stage") as pool:
        try:
            waiting: set[Future[None]] = {pool.submit(job, stop) for job in jobs}
            while waiting:
                ended, waiting = wait(waiting, LOOK_S, FIRST_EXCEPTION)
                work.look(progress)
                for future in ended:
                    future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _copy(
    storage: Storage,
    source: str,
    target: Path,
    entry: FileEntry,
    rate_limit: RateLimit,
    progress: Progress,
    stop: threading.Event,
) -> None:
    """Copy one file, from where an earlier attempt was cut off; from the start if that does not come out whole."""
    part = _part(target)
    with _reporting(target):
        if _size(target) is not None:
            os.rename(target, part)
        began = _size(part) or 0
        if not _fill(storage, source, part, entry, rate_limit, progress, stop) and not (
            began and _fill(storage, source, part, entry, rate_limit, progress, stop)
        ):
            part.unlink(missing_ok=True)
            raise StageError(f"{source} does not match its checksum in the index; make the shard again at the source")
        os.rename(part, target)


def _fill(
    storage: Storage,
    source: str,
    part: Path,
    entry: FileEntry,
    rate_limit: RateLimit,
    progress: Progress,
    stop: threading.Event,
) -> bool:
    """Complete ``part``; True if it is whole and durable, False (and ``part`` is empty) if its content is wrong."""
    with _open(part, os.O_RDWR | os.O_CREAT) as file:
        if os.fstat(file.fileno()).st_size > entry.size:
            file.truncate(0)
        digest = _hash(file, RateLimit(None), progress, stop)
        counted = file.tell()
        if counted < entry.size:
            with storage.open(source, counted) as origin:
                while not stop.is_set() and (block := _read(origin, source, min(BLOCK, entry.size - counted))):
                    rate_limit(len(block))
                    file.write(block)
                    digest.update(block)
                    counted += len(block)
                    progress.add(len(block))
        if stop.is_set():
            raise StageError("stopped")
        if counted == entry.size and PREFIX + digest.hexdigest() == entry.checksum:
            file.flush()
            os.fsync(file.fileno())
            return True
        progress.add(-counted)
        file.truncate(0)
        return False


def _read(origin: BinaryIO, source: str, size: int) -> bytes:
    try:
        return origin.read(size) if size else b""
    except Exception as error:  # clients of object storages raise what they like
        raise StorageError(f"{source} could not be read on: {type(error).__name__}: {error}") from error


def _hash(file: BinaryIO, rate_limit: RateLimit, progress: Progress, stop: threading.Event) -> xxhash.xxh3_128:
    """The digest of the rest of ``file``."""
    digest = xxhash.xxh3_128()
    while not stop.is_set() and (block := file.read(BLOCK)):
        rate_limit(len(block))
        digest.update(block)
        progress.add(len(block))
    return digest


def _open(path: Path, flags: int) -> BinaryIO:
    return open(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "rb" if flags == os.O_RDONLY else "r+b")


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _size(path: Path) -> int | None:
    """Bytes of a regular file, None if there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _check_space(target: Path, missing: Sequence[tuple[Corpus, FileEntry]]) -> None:
    disk = shutil.disk_usage(target)
    there = ((target / corpus.path(entry), entry.size) for corpus, entry in missing)
    begun = sum(min(size, _size(path) or _size(_part(path)) or 0) for path, size in there)
    needed, free = sum(entry.size for _, entry in missing) - begun, disk.free - LEFT_FREE * disk.total
    if needed > max(free, 0.0):
        raise StageError(
            f"{target} has room for {max(free, 0.0) / 1e9:.1f} GB and {needed / 1e9:.1f} GB are missing; "
            "make room, or set spare.folder to a larger disk"
        )


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _write(path: Path, content: bytes) -> None:
    with _open(path, os.O_RDWR | os.O_CREAT) as file:
        file.truncate(0)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _same_index(target: Path, corpus: Corpus) -> bool:
    path = target / corpus.folder / INDEX
    return _size(path) == len(corpus.index) and path.read_bytes() == corpus.index


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StageError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold the folder against a second staging. Raises StageError."""
    descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise StageError(f"another `opsd spare stage` is writing to {target}; wait for it") from None
    finally:
        os.close(descriptor)


def remove(target: Path) -> int:
    """Delete the staged files under ``target``, by the names in its indexes; the bytes freed.

    What a staging that was cut off has begun is among them. Raises StageError, StorageError.
    """
    if not target.is_dir():
        return 0
    make_folder(target)
    freed, storage = 0, Folder(target)
    with _alone(target), _reporting(target):
        for corpus in indexed(storage, INDEX):
            folder = target / corpus.folder
            os.rename(folder / INDEX, folder / DRAFT)
        for corpus in indexed(storage, DRAFT):
            folder = target / corpus.folder
            for path in (path for entry in corpus.files for path in (folder / entry.name, _part(folder / entry.name))):
                freed += _size(path) or 0
                path.unlink(missing_ok=True)
            (folder / DRAFT).unlink()
    return freed
