"""From texts to token shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from opsd.trainer.data.shards import DOCUMENT, TOKENIZER, DataError, File, Index, Shard, describe, write_index

BATCH_FILES = 256
TRAINING_BYTES = 20_000_000
"""A tokenizer is trained on the beginning of the text; its merges hardly change after about 10 MB."""


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer with ``vocab`` ids; 0 begins a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """An existing ``tokenizer.json``, with ``<|document|>`` added if missing. Raises DataError.

    The library gives what it adds the number of tokens as its id, which another token has where ids are left out.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.add_special_tokens([DOCUMENT])
    document = tokenizer.token_to_id(DOCUMENT)
    tokens = tokenizer.get_vocab(with_added_tokens=True).items()
    if other := next((token for token, id_ in tokens if id_ == document and token != DOCUMENT), None):
        raise DataError(
            f"{path} leaves out ids, so that {DOCUMENT} would get {document}, which is that of {other!r}; give every "
            "id below the greatest a token"
        )
    return tokenizer


def ids_of(tokenizer: Tokenizer) -> int:
    """The greatest id of a token, plus 1; the library counts tokens, and ids may be left out."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def make_corpus(texts: Iterable[str], tokenizer: Tokenizer, folder: Path, shard_tokens: int) -> Index:
    """Tokenise ``texts`` into shards of about ``shard_tokens`` tokens in ``folder``. Documents are never split.

    Raises DataError if there is no text, OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER))
    return commit_corpus(folder, tokenizer, write_shards(texts, tokenizer, folder, shard_tokens))


def commit_corpus(folder: Path, tokenizer: Tokenizer, shards: Sequence[Shard]) -> Index:
    """Write the index of the ``shards`` in ``folder``. Raises DataError if there are none."""
    if not shards:
        raise DataError("the sources have no text")
    index = Index(ids_of(tokenizer), dtype_for(tokenizer), describe(folder / TOKENIZER), tuple(shards))
    write_index(folder, index)
    return index


def dtype_for(tokenizer: Tokenizer) -> str:
    """The smallest type for all ids."""
    return "uint16" if ids_of(tokenizer) <= 1 << 16 else "uint32"


def write_shards(
    texts: Iterable[str], tokenizer: Tokenizer, folder: Path, shard_tokens: int, prefix: str = "shard"
) -> list[Shard]:
    """Write the shards of ``texts`` durably, with names that begin with ``prefix``. Raises OSError."""
    # Text that happens to contain the marker must not begin a document.
    tokenizer.encode_special_tokens = True
    writer = _ShardWriter(folder, prefix, dtype_for(tokenizer))
    shards: list[Shard] = []
    for document in _encode(texts, tokenizer):
        writer.add(document)
        if writer.tokens >= shard_tokens:
            shards.append(writer.finish(len(shards)))
    if writer.tokens:
        shards.append(writer.finish(len(shards)))
    return shards


def _encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    begin = tokenizer.token_to_id(DOCUMENT)
    assert begin is not None
    iterator = iter(texts)
    while batch := list(islice(iterator, BATCH_FILES)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield [begin, *encoding.ids]


@dataclass
class _ShardWriter:
    folder: Path
    prefix: str
    dtype: str
    tokens: int = 0

    def __post_init__(self) -> None:
        self._documents: list[np.ndarray] = []

    def add(self, document: list[int]) -> None:
        self._documents.append(np.array(document, dtype=self.dtype))
        self.tokens += len(document)

    def finish(self, number: int) -> Shard:
        lengths = [len(document) for document in self._documents]
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.uint64)
        name = f"{self.prefix}-{number:05d}"
        shard = Shard(
            self.tokens,
            len(lengths),
            _write(self.folder / f"{name}.tokens", np.concatenate(self._documents)),
            _write(self.folder / f"{name}.documents", starts),
        )
        self._documents, self.tokens = [], 0
        return shard


def _write(path: Path, array: np.ndarray) -> File:
    with open(path, "wb") as file:
        file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        file.flush()
        os.fsync(file.fileno())
    return describe(path)
