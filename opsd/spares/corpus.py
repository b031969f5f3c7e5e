"""The shards that a spare needs, read from their indexes (trainer/data/shards.py) without numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

import xxhash
from pydantic import BaseModel, NonNegativeInt, ValidationError

from opsd.checkpoints.manifest import FileEntry
from opsd.spares.storage import AbsentError, Storage, StorageError

INDEX = "index.json"
FORMAT = 1


class _File(BaseModel):
    name: str
    size: NonNegativeInt
    checksum: str


class _Shard(BaseModel):
    token_file: _File
    document_file: _File


class _Index(BaseModel):
    format: int
    tokenizer: _File
    shards: tuple[_Shard, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    """One corpus: its folder under the root ("" is the root), the files that its index lists, and the index itself."""

    folder: str
    files: tuple[FileEntry, ...]
    index: bytes

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
    folders = [""] if _has(storage, "", index) else [name for name in storage.folders() if _has(storage, name, index)]
    return tuple(_read(storage, folder, index) for folder in folders)


def digest_of(corpora: tuple[Corpus, ...]) -> str:
    """Identifies the data to stage: other data has another digest."""
    digest = xxhash.xxh3_128()
    for corpus in corpora:
        digest.update(f"{corpus.folder}\0{len(corpus.index)}\0".encode())
        digest.update(corpus.index)
    return f"xxh3_128:{digest.hexdigest()}"


def _has(storage: Storage, folder: str, index: str) -> bool:
    try:
        storage.open(str(PurePosixPath(folder, index))).close()
    except AbsentError:
        return False
    return True


def _read(storage: Storage, folder: str, name: str) -> Corpus:
    path = str(PurePosixPath(folder, name))
    with storage.open(path) as file:
        content = b"".join(iter(lambda: file.read(1 << 20), b""))
    try:
        index = _Index.model_validate_json(content)
    except ValidationError as error:
        raise StorageError(f"{path} is not an index of token shards") from error
    if index.format != FORMAT:
        raise StorageError(f"{path} has format {index.format}, this opsd reads format {FORMAT}")
    listed = [index.tokenizer, *(file for shard in index.shards for file in (shard.token_file, shard.document_file))]
    if any(PurePosixPath(file.name).name != file.name or file.name.startswith(".") for file in listed):
        raise StorageError(f"{path} names files outside its folder")
    return Corpus(folder, tuple(FileEntry(file.name, file.size, file.checksum) for file in listed), content)
