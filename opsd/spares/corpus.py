"""The shards that a spare needs, read from their indexes (trainer/data/shards.py) without numpy."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

import xxhash
from pydantic import BaseModel, NonNegativeInt, ValidationError

from opsd.checkpoints.manifest import FileEntry
from opsd.spares.transfer import AbsentError, Storage, StorageError

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
    return tuple(_read(storage, folder, index) for folder in folders)


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


def _read(storage: Storage, folder: str, name: str) -> Corpus:
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
