"""Token shards: flat files of token ids, the start of every document, and an index that describes them.

A corpus is a folder::

    index.json            sizes and checksums of the files below; the corpus exists once this does
    tokenizer.json        the tokenizer that made the ids (Hugging Face format)
    shard-00000.tokens    ids, little-endian uint16 or uint32
    shard-00000.documents uint64 position of the first token of each document, ascending from 0

A document begins with the tokenizer's own BOS and ends with the separator. Without a BOS it begins with the separator.
As an input that predicts the first word of its document, as a target it ends the previous one. So every token of a
shard is a target, with its context in its own document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from opsd.checkpoints.manifest import checksum
from opsd.durable import replace, sync_folder

INDEX = "index.json"
TOKENIZER = "tokenizer.json"
DOCUMENT = "<|document|>"
"""The separator of tokenizers that are trained here."""

DTYPES = ("uint16", "uint32")
FORMAT = 1
MAPPED_SHARDS = 8192
SAMPLED_SHARDS, SAMPLED = 8, 500
"""Shards of a corpus, and documents of each, that are looked at before a run."""


class DataError(ValueError):
    """The corpus cannot be used; the message is one sentence naming the file."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a corpus: its name in the folder, size in bytes, and ``algorithm:hexdigest`` of the content.

    The checksum is fast and detects damage; ``sha256``, hexadecimal, is for copies over networks that are not trusted.
    Indexes of earlier releases do not have it.
    """

    name: str
    size: int
    checksum: str
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: number of tokens and of documents, and its two files."""

    tokens: int
    documents: int
    token_file: File
    document_file: File

    @property
    def files(self) -> tuple[File, File]:
        """Both files."""
        return self.token_file, self.document_file


@dataclass(frozen=True, slots=True)
class Framing:
    """The tokens around each document: the one that separates documents, and what the tokenizer begins a text with.

    ``template`` is the checksum of the chat template with which the texts were rendered, "" without one.
    """

    separator: str = DOCUMENT
    bos: tuple[str, ...] = ()
    template: str = ""

    @property
    def begin(self) -> tuple[str, ...]:
        """The tokens before a document."""
        return self.bos or (self.separator,)

    @property
    def end(self) -> tuple[str, ...]:
        """The tokens after a document."""
        return (self.separator,) if self.bos and self.separator not in self.bos else ()

    @staticmethod
    def parse(raw: Mapping[str, Any]) -> Framing:
        """That of an index or a part; older ones lack some of it."""
        return Framing(raw.get("separator", DOCUMENT), tuple(raw.get("bos", ())), raw.get("template", ""))


@dataclass(frozen=True, slots=True)
class Index:
    """The content of ``index.json``; ``vocab`` is the number of token ids, ``dtype`` that of the token files.

    ``framing`` has the tokens around each document, ``read`` what the corpus was made from. ``made_by`` has the digest
    of the code that read and tokenised the texts, and versions. All three are missing in older indexes.
    """

    vocab: int
    dtype: str
    tokenizer: File
    shards: tuple[Shard, ...]
    format: int = FORMAT
    framing: Framing = Framing()
    read: Tally | None = None
    made_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Identifies the tokens and their order, independent of the folder."""
        return "/".join(shard.token_file.checksum for shard in self.shards)


@dataclass(slots=True)
class Tally:
    """The origin of a corpus: files and their bytes on the disk, documents, and dropped ones by reason."""

    files: int = 0
    bytes: int = 0
    documents: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str, count: int = 1) -> None:
        """Count what is left out, and why."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def add(self, other: Tally) -> None:
        """Count what ``other`` has too."""
        self.files += other.files
        self.bytes += other.bytes
        self.documents += other.documents
        for reason, count in other.dropped.items():
            self.drop(reason, count)

    @staticmethod
    def parse(raw: Mapping[str, Any]) -> Tally:
        """The tally that ``dataclasses.asdict`` wrote. Raises KeyError or TypeError."""
        return Tally(raw["files"], raw["bytes"], raw["documents"], dict(raw["dropped"]))


def describe(path: Path) -> File:
    """The entry for an existing file."""
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return File(path.name, path.stat().st_size, checksum(path), sha256)


def read_index(folder: Path) -> Index:
    """Read the index of the corpus in ``folder``. Raises DataError."""
    path = folder / INDEX
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise DataError(f"{path} has format {raw['format']}, this trainer reads format {FORMAT}")
        shards = tuple(parse_shard(entry) for entry in raw["shards"])
        index = Index(
            raw["vocab"], raw["dtype"], File(**raw["tokenizer"]), shards,
            framing=Framing.parse(raw.get("framing", {})),
            read=Tally.parse(raw["read"]) if raw.get("read") else None, made_by=dict(raw.get("made_by", {})),
        )  # fmt: skip
    except OSError as error:
        raise DataError(f"{path}: unreadable ({error.strerror}); make it with `python -m opsd.trainer.data`") from error
    except DataError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not an index of token shards: {error!r}") from error
    if index.dtype not in DTYPES:
        raise DataError(f"{path} has token ids of type {index.dtype}, this trainer reads {' and '.join(DTYPES)}")
    if any(Path(entry.name).name != entry.name for entry in _files(index)):
        raise DataError(f"{path} names files outside its folder")
    return index


def parse_shard(entry: Mapping[str, Any]) -> Shard:
    """The shard described by an entry of an index. Raises KeyError or TypeError."""
    return Shard(entry["tokens"], entry["documents"], File(**entry["token_file"]), File(**entry["document_file"]))


def find_index(folder: Path, fallback: Path | None) -> Index:
    """The index of the corpus in ``folder``, or else of its copy in ``fallback``. Raises DataError."""
    return read_index(folder if fallback is None or (folder / INDEX).exists() else fallback)


SHOWN_SEQUENCE = 4096
"""Sequence length in tokens for which `summary` tells what the ends of shards leave over, if no other is given."""


def summary(index: Index, length: int = SHOWN_SEQUENCE) -> dict[str, int]:
    """Counts by name: what was read and dropped, and what sequences of ``length`` tokens leave over."""
    lines: dict[str, int] = {}
    if index.read:
        lines |= {"files read": index.read.files, "bytes read": index.read.bytes}
        lines |= {f"{reason} dropped": count for reason, count in sorted(index.read.dropped.items())}
    total = sum(shard.tokens for shard in index.shards)
    lines[f"tokens left over at the ends of shards with sequences of {length:,}"] = total - length * sum(
        sequence_counts(index, length)
    )
    return lines


def write_index(folder: Path, index: Index) -> None:
    """Write the index, which makes the corpus exist, once all its files are there and complete."""
    sync_folder(folder)
    replace(folder / INDEX, json.dumps(asdict(index), indent=1).encode())


def place(folder: Path, entry: File, fallback: Path | None) -> Path:
    """The file to read: in ``folder`` if it is there with its full size, otherwise in ``fallback``."""
    path = folder / entry.name
    if fallback is not None:
        with suppress(OSError):
            if path.stat().st_size == entry.size:
                return path
        return fallback / entry.name
    return path


def verify(
    folder: Path, index: Index, *, content: bool, part: int = 0, parts: int = 1, fallback: Path | None = None
) -> None:
    """Compare the files with the index: all sizes and, of every ``parts``-th file, the ``content``.

    Raises DataError naming the first file that differs.
    """
    for number, entry in enumerate(_files(index)):
        path = place(folder, entry, fallback)
        try:
            size = path.stat().st_size
            if size != entry.size:
                raise DataError(f"{path} has {size} bytes, the index says {entry.size}; copy or make the shard again")
            if content and number % parts == part and checksum(path) != entry.checksum:
                raise DataError(f"{path} does not match its checksum in the index; copy or make the shard again")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; copy or make the shard again") from error


def _files(index: Index) -> Iterator[File]:
    yield index.tokenizer
    for shard in index.shards:
        yield from shard.files


def framed_shares(
    folder: Path, index: Index, begin: Sequence[int], end: Sequence[int], fallback: Path | None = None
) -> tuple[float, float]:
    """Of a sample of the documents, the shares that begin with the ids ``begin`` and end with the ids ``end``.

    Reads at most ``SAMPLED`` documents from each of a few shards. Raises OSError.
    """
    seen = begun = ended = 0
    step = max(1, len(index.shards) // SAMPLED_SHARDS)
    for shard in index.shards[::step]:
        tokens, documents = (place(folder, entry, fallback) for entry in shard.files)
        stored = np.memmap(tokens, index.dtype, "r")
        starts = np.append(np.memmap(documents, np.uint64, "r"), len(stored)).astype(np.int64)
        for at, after in list(pairwise(starts))[:: max(1, len(starts) // SAMPLED)]:
            document = stored[at:after].tolist()
            seen += 1
            begun += document[: len(begin)] == list(begin)
            ended += document[len(document) - len(end) :] == list(end)
    return (begun / seen, ended / seen) if seen else (1.0, 1.0)


class Corpus:
    """Sequences of ``length`` tokens, numbered through all shards; the files are mapped, not read.

    They follow each other without gaps; with ``within`` they are only those that lie in one document each, for which
    the starts of all documents are read. At most ``MAPPED_SHARDS`` are mapped at once: a process may have 65,530
    mappings (vm.max_map_count).
    """

    def __init__(
        self, folder: Path, index: Index, length: int, fallback: Path | None = None, *, within: bool = False
    ) -> None:
        self._folder, self._index, self._fallback = folder, index, fallback
        self.length = length
        self._shard = lru_cache(MAPPED_SHARDS)(self._map)
        self._begins = [self._within(number) for number in range(len(index.shards))] if within else None
        counts = [len(begins) for begins in self._begins] if self._begins else sequence_counts(index, length)
        self._ends = np.cumsum(counts)
        self.sequences = int(self._ends[-1]) if index.shards else 0

    def read(self, sequences: Iterable[int], tokens: npt.NDArray[np.int64], documents: npt.NDArray[np.int32]) -> None:
        """Fill ``tokens`` [n, length + 1] and ``documents`` [n, length], the document of each token within its row.

        Consecutive sequences share one token: the last target of one is the first input of the next.
        """
        for row, sequence in enumerate(sequences):
            number = int(np.searchsorted(self._ends, sequence, side="right"))
            first = self._ends[number - 1] if number else 0
            place = int(sequence - first)
            at = int(self._begins[number][place]) if self._begins else place * self.length
            stored, starts = self._shard(number)
            tokens[row] = stored[at : at + self.length + 1]
            low, high = np.searchsorted(starts, np.array([at, at + self.length - 1], dtype=np.uint64), side="right")
            documents[row] = 0
            documents[row, (starts[low:high] - np.uint64(at)).astype(np.int64)] = 1
            np.cumsum(documents[row], out=documents[row])

    def _within(self, number: int) -> npt.NDArray[np.int64]:
        _, starts = self._map(number)
        return sequences_within(np.asarray(starts, np.int64), self._index.shards[number].tokens, self.length)

    def _map(self, number: int) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.uint64]]:
        shard = self._index.shards[number]
        tokens, documents = (place(self._folder, entry, self._fallback) for entry in shard.files)
        return np.memmap(tokens, self._index.dtype, "r"), np.memmap(documents, np.uint64, "r")


def open_corpus(folder: Path, fallback: Path | None, length: int, *, within: bool = False) -> Corpus:
    """The corpus in ``folder``; missing files are taken from ``fallback``. Raises DataError."""
    return Corpus(folder, find_index(folder, fallback), length, fallback, within=within)


def sequences_within(starts: npt.NDArray[np.int64], tokens: int, length: int) -> npt.NDArray[np.int64]:
    """The starts of sequences within one document each, as many as fit into it, from its first token on.

    ``starts`` are the documents' of a shard of ``tokens`` tokens, whose last token is only a target.
    """
    fitting = np.diff(starts, append=max(0, tokens - 1)) // length
    nth = np.arange(fitting.sum()) - np.repeat(np.cumsum(fitting) - fitting, fitting)
    begins: npt.NDArray[np.int64] = np.repeat(starts, fitting) + nth * length
    return begins


def sequence_counts(index: Index, length: int) -> list[int]:
    """Number of sequences of ``length`` tokens in each shard; its last token is only a target."""
    return [max(0, shard.tokens - 1) // length for shard in index.shards]
