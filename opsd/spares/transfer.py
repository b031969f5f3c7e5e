"""Files for spares: copied whole or not at all at a bounded pace, and proved by the corpus's index.

Copying and hashing files: in threads, at a limited rate, resumed where an earlier copy stopped.

Where shards come from: a folder, or any URL that fsspec supports.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

import xxhash
from pydantic import BaseModel, NonNegativeInt, ValidationError

from opsd import durable, pip_install
from opsd.checkpoints.manifest import FileEntry


class StorageError(Exception):
    """The storage cannot be used or lacks a file; the message is one sentence."""


class AbsentError(StorageError):
    """There is no such file."""


class Storage(Protocol):
    """Files by their path relative to the root. Methods raise StorageError; ``open`` raises AbsentError for no file."""

    def folders(self) -> list[str]:
        """The folders right under the root."""

    def open(self, path: str, offset: int = 0) -> BinaryIO:
        """The file at ``path``, opened at byte ``offset``. The caller closes it."""


def open_storage(source: str) -> Storage:
    """The storage at the folder or URL ``source``. Raises StorageError."""
    if "://" not in source:
        return Folder(Path(source))
    try:
        from fsspec.core import url_to_fs

        return Url(*url_to_fs(source))
    except (ImportError, ValueError) as error:
        raise StorageError(f"{source} cannot be used: {error}; {pip_install('storage')}") from error


class Folder:
    """A folder, for instance on a shared file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folders(self) -> list[str]:
        try:
            return sorted(path.name for path in self._root.iterdir() if path.is_dir())
        except OSError as error:
            raise StorageError(f"{self._root} cannot be read: {error.strerror}") from error

    def open(self, path: str, offset: int = 0) -> BinaryIO:
        try:
            file = open(self._root / path, "rb")  # noqa: SIM115 # the caller closes it
            file.seek(offset)
        except OSError as error:
            kind = AbsentError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"{self._root / path} cannot be read: {error.strerror}") from error
        return file


class Url:
    """A folder of an fsspec file system: object storage, or a web server, for instance on another node."""

    def __init__(self, filesystem: Any, base: str) -> None:
        self._files, self._base = filesystem, base.rstrip("/")
        # Simple web servers such as Python's have no range requests: files are read as a stream.
        self._options = {"block_size": 0} if "http" in filesystem.protocol else {}

    def folders(self) -> list[str]:
        try:
            found = self._files.ls(self._base, detail=True)
        except Exception as error:  # clients of object storages raise arbitrary exceptions
            raise StorageError(f"{self._base} cannot be listed: {_said(error)}") from error
        return sorted(str(e["name"]).rstrip("/").rpartition("/")[2] for e in found if e["type"] == "directory")

    def open(self, path: str, offset: int = 0) -> BinaryIO:
        try:
            file: BinaryIO = self._files.open(f"{self._base}/{path}", "rb", **self._options)
            _go_to(file, offset)
        except Exception as error:  # clients of object storages raise arbitrary exceptions
            kind = AbsentError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"{self._base}/{path} cannot be read: {_said(error)}") from error
        return file


def _go_to(file: BinaryIO, offset: int) -> None:
    """Move ``file`` to ``offset``; a stream is read up to there."""
    try:
        file.seek(offset)
    except ValueError:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            offset -= len(block)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error) or 'no reason given'}".splitlines()[0]


BLOCK = 1 << 22
LOOK_S = 0.5
_XXH3, _SHA256 = "xxh3_128:", "sha256:"


class Digest(Protocol):
    """A hash of hashlib or xxhash."""

    def update(self, block: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class StageError(Exception):
    """Staging failed; the message says why in one sentence. What was copied so far is kept and used again."""


BURST_S = 0.5
"""Unused capacity is kept for this long."""


class RateLimit:
    """Limits several threads together to ``rate`` bytes per second, None for no limit; ``wait`` sleeps."""

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._wait = rate, clock, wait
        self._lock = threading.Lock()
        self._free_at = clock()

    def __call__(self, size: int) -> None:
        """Wait until ``size`` more bytes may pass."""
        if self._rate is None:
            return
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - BURST_S) + size / self._rate
            delay = self._free_at - now
        if delay > 0:
            self._wait(delay)


@dataclass
class Progress:
    """Bytes done of ``total``, counted by several threads."""

    total: int
    done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, size: int) -> None:
        """Count ``size`` bytes; negative for a file that is started over."""
        with self._lock:
            self.done += size


@dataclass(frozen=True, slots=True)
class Work:
    """How to copy or read: ``look`` is called with the progress about twice a second."""

    rate_limit: RateLimit
    parallel: int = 8
    look: Callable[[Progress], None] = lambda _progress: None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies or hashes files in threads; ``stop`` ends all of them."""

    work: Work
    progress: Progress
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run ``tasks`` in threads; the first exception stops the others and is raised."""
        with ThreadPoolExecutor(self.work.parallel, thread_name_prefix="stage") as pool:
            try:
                waiting: set[Future[None]] = {pool.submit(task) for task in tasks}
                while waiting:
                    ended, waiting = wait(waiting, LOOK_S, FIRST_EXCEPTION)
                    self.work.look(self.progress)
                    for future in ended:
                        future.result()
            except BaseException:
                self.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def copy(self, storage: Storage, source: str, target: Path, entry: FileEntry) -> None:
        """Copy one file, resuming an earlier copy; starts over if the result does not match its checksum."""
        part = part_of(target)
        with reporting(target):
            if size_of(target) is not None:
                durable.rename(target, part)
            began = size_of(part) or 0
            if not self._fill(storage, source, part, entry) and not (
                began and self._fill(storage, source, part, entry)
            ):
                part.unlink(missing_ok=True)
                raise StageError(
                    f"{source} does not match its checksum in the index; make the shard again at the source"
                )
            durable.rename(part, target)

    def _fill(self, storage: Storage, source: str, part: Path, entry: FileEntry) -> bool:
        """Complete ``part``: True if whole and durable; if its content is wrong, it is emptied and this is False."""
        with open_file(part, os.O_RDWR | os.O_CREAT) as file:
            if os.fstat(file.fileno()).st_size > entry.size:
                file.truncate(0)
            digest = self.hash(file, RateLimit(None), entry)
            counted = file.tell()
            if counted < entry.size:
                with storage.open(source, counted) as origin:
                    while not self.stop.is_set() and (block := _read(origin, source, min(BLOCK, entry.size - counted))):
                        self.work.rate_limit(len(block))
                        file.write(block)
                        digest.update(block)
                        counted += len(block)
                        self.progress.add(len(block))
            if self.stop.is_set():
                raise StageError("stopped")
            if counted == entry.size and matches(digest, entry):
                file.flush()
                try:
                    os.fsync(file.fileno())
                except OSError:  # Linux would read it from memory the next time, and it would seem whole
                    file.truncate(0)
                    raise
                return True
            self.progress.add(-counted)
            file.truncate(0)
            return False

    def hash(self, file: BinaryIO, rate_limit: RateLimit, entry: FileEntry) -> Digest:
        """The digest of the rest of ``file``, by the algorithm of the checksum of ``entry``."""
        digest: Digest = hashlib.sha256() if entry.checksum.startswith(_SHA256) else xxhash.xxh3_128()
        while not self.stop.is_set() and (block := file.read(BLOCK)):
            rate_limit(len(block))
            digest.update(block)
            self.progress.add(len(block))
        return digest


def matches(digest: Digest, entry: FileEntry) -> bool:
    """Whether ``digest`` is the checksum of ``entry``."""
    return entry.checksum in (_XXH3 + digest.hexdigest(), _SHA256 + digest.hexdigest())


def _read(origin: BinaryIO, source: str, size: int) -> bytes:
    try:
        return origin.read(size) if size else b""
    except Exception as error:  # clients of object storages raise arbitrary exceptions
        raise StorageError(f"{source} could not be read on: {type(error).__name__}: {error}") from error


def open_file(path: Path, flags: int) -> BinaryIO:
    """Open a file that is not a symbolic link."""
    return open(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "rb" if flags == os.O_RDONLY else "r+b")


def size_of(path: Path) -> int | None:
    """The size of a regular file in bytes, None if there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def part_of(path: Path) -> Path:
    """The name of ``path`` while it is incomplete."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Turn OSError into StageError."""
    try:
        yield
    except OSError as error:
        raise StageError(f"{path} cannot be written: {error.strerror or error}") from error


# The shards that a spare needs, read from their indexes (trainer/data/shards.py) without numpy.


INDEX = "index.json"
FORMAT = 1
MAX_INDEX = 256 << 20
"""Limit of an index in bytes: that of a corpus of 100,000 shards has 50 MB."""


class _File(BaseModel):
    name: str
    size: NonNegativeInt
    checksum: str
    sha256: str = ""


class _Shard(BaseModel):
    token_file: _File
    document_file: _File


class _Index(BaseModel):
    format: int
    tokenizer: _File
    shards: tuple[_Shard, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    """One corpus: its folder under the root ("" is the root), the files that its index lists, and the index itself.

    ``sha256`` has the hash of each file by its name, where the index has them.
    """

    folder: str
    files: tuple[FileEntry, ...]
    index: bytes
    sha256: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(entry.size for entry in self.files)

    def path(self, entry: FileEntry) -> str:
        """The path of one of its files, relative to the root."""
        return str(PurePosixPath(self.folder, entry.name))


def read_corpora(storage: Storage) -> tuple[Corpus, ...]:
    """The corpus at the root of ``storage``, or those in its folders if the root has no index."""
    found = indexed(storage, INDEX)
    if not found:
        raise StorageError(f"the source has no {INDEX}, nor have its folders; `python -m opsd.trainer.data` makes one")
    return found


def indexed(storage: Storage, index: str) -> tuple[Corpus, ...]:
    """As ``read_corpora``, with indexes named ``index``; empty if there are none. Raises StorageError."""
    names = [""] if _has(storage, "", index) else [name for name in storage.folders() if not name.startswith(".")]
    folders = [name for name in names if not name or _has(storage, name, index)]
    return tuple(_corpus_read(storage, folder, index) for folder in folders)


def digest_of(corpora: tuple[Corpus, ...]) -> str:
    """Identifies the data to stage: other data has another digest."""
    digest = xxhash.xxh3_128()
    for corpus in corpora:
        digest.update(f"{corpus.folder}\0{len(corpus.index)}\0".encode())
        digest.update(corpus.index)
    return f"xxh3_128:{digest.hexdigest()}"


def sha256_of(corpora: tuple[Corpus, ...]) -> str:
    """Identifies the data as ``digest_of`` does, also against somebody who makes other data for it."""
    digest = hashlib.sha256()
    for corpus in corpora:
        digest.update(f"{corpus.folder}\0{len(corpus.index)}\0".encode())
        digest.update(corpus.index)
    return f"sha256:{digest.hexdigest()}"


def needs_proof(source: str) -> bool:
    """Whether anybody on the network may answer instead of ``source``."""
    return re.search(r"(^|::)(http|ftp)://", source.lower()) is not None


def proven(corpora: tuple[Corpus, ...], expected: str) -> tuple[Corpus, ...]:
    """The corpora with SHA-256 as the checksums of their files, if ``expected`` is their ``sha256_of``.

    Raises StorageError.
    """
    if not hmac.compare_digest(sha256_of(corpora).encode(), expected.encode()):
        raise StorageError("the indexes at the source are not those of spare.digest; nothing is copied")
    for corpus in corpora:
        if missing := next((entry.name for entry in corpus.files if not corpus.sha256.get(entry.name)), ""):
            index = PurePosixPath(corpus.folder, INDEX)
            raise StorageError(f"{index} has no SHA-256 of {missing}; make the shards again with this opsd")
    return tuple(
        replace(c, files=tuple(replace(entry, checksum=f"sha256:{c.sha256[entry.name]}") for entry in c.files))
        for c in corpora
    )


def _has(storage: Storage, folder: str, index: str) -> bool:
    try:
        storage.open(str(PurePosixPath(folder, index))).close()
    except AbsentError:
        return False
    return True


def _corpus_read(storage: Storage, folder: str, name: str) -> Corpus:
    path = str(PurePosixPath(folder, name))
    with storage.open(path) as file:
        content = b""
        while len(content) <= MAX_INDEX and (block := file.read(1 << 20)):
            content += block
    if len(content) > MAX_INDEX:
        raise StorageError(f"{path} has more than {MAX_INDEX >> 20} MiB and is not read")
    try:
        index = _Index.model_validate_json(content)
    except ValidationError as error:
        raise StorageError(f"{path} is not an index of token shards") from error
    if index.format != FORMAT:
        raise StorageError(f"{path} has format {index.format}, this opsd reads format {FORMAT}")
    listed = [index.tokenizer, *(file for shard in index.shards for file in (shard.token_file, shard.document_file))]
    if any(PurePosixPath(file.name).name != file.name or file.name.startswith(".") for file in listed):
        raise StorageError(f"{path} names files outside its folder")
    entries = tuple(FileEntry(file.name, file.size, file.checksum) for file in listed)
    return Corpus(folder, entries, content, {file.name: file.sha256 for file in listed})
