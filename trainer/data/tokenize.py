"""From texts to token shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from opsd import __version__
from opsd.durable import replace
from opsd.trainer.data.shards import (
    DOCUMENT,
    TOKENIZER,
    DataError,
    File,
    Framing,
    Index,
    Shard,
    Tally,
    describe,
    write_index,
)

BATCH_FILES = 256
TRAINING_BYTES = 20_000_000
"""A tokenizer is trained on the beginning of the text; its merges hardly change after about 10 MB."""

MAX_UNCOVERED = 0.01
"""Share of characters without a token that is accepted: normalisation drops control characters and the like."""

NAMES_OF_EOS = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end\N{LOWER ONE EIGHTH BLOCK}of\N{LOWER ONE EIGHTH BLOCK}"
    "sentence|>", "<\N{FULLWIDTH VERTICAL LINE}end\N{LOWER ONE EIGHTH BLOCK}of\N{LOWER ONE EIGHTH BLOCK}sentence"
    "\N{FULLWIDTH VERTICAL LINE}>", "[EOS]",
)  # fmt: skip
"""What published tokenizers call the token after a text (GPT-2, Llama 2 and 3, Gemma, DeepSeek)."""


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
    """An existing ``tokenizer.json``, which gives whole texts the ids that they always have. Raises DataError.

    A file keeps how it was used last. What is left on of that would cut texts (truncation), add tokens to them
    (padding) or change them by chance (dropout), and is off here.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def add_separator(tokenizer: Tokenizer, token: str) -> None:
    """Make ``token`` one of the ``tokenizer`` if it is none. Raises DataError.

    The library gives what it adds the number of tokens as its id, which another token has where ids are left out.
    """
    tokenizer.add_special_tokens([token])
    id_ = tokenizer.token_to_id(token)
    if other := next((name for name, at in _vocab(tokenizer).items() if at == id_ and name != token), None):
        raise DataError(
            f"the tokenizer leaves out ids, so that {token} would get {id_}, which is that of {other!r}; give every "
            "id below the greatest a token, or take a --separator that it has"
        )


def framing_of(tokenizer: Tokenizer, file: Path | None = None, separator: str = "") -> Framing:
    """The tokens around each document: the separator is the given one, or else the tokenizer's own end of a text.

    That is what its files beside ``file`` call its eos_token, what it ends a text with itself, or the only well-known
    name of one that it has. It begins a document with what it begins a text with itself. Raises DataError.
    """
    try:
        before, after = _around(tokenizer)
    except Exception as error:  # the library raises bare Exception, for instance without a token for what is unknown
        raise DataError(f"{file or 'the tokenizer'} cannot encode a text: {error}") from error
    if separator:
        add_separator(tokenizer, separator)
    elif tokenizer.token_to_id(DOCUMENT) is not None:
        separator = DOCUMENT
    else:
        known = [name for name in NAMES_OF_EOS if tokenizer.token_to_id(name) is not None]
        separator = _named(file) or (after[0] if len(after) == 1 else known[0] if len(known) == 1 else "")
        if tokenizer.token_to_id(separator) is None:
            which = f"it has {' and '.join(known)}" if known else f"--separator '{DOCUMENT}' adds one"
            raise DataError(
                f"{file or 'the tokenizer'} does not say which token ends a text; name it with --separator ({which})"
            )
    return Framing(separator, () if before == (separator,) else before)


def _around(tokenizer: Tokenizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the tokenizer itself puts before and after a text."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False).tokens, tokenizer.encode("a").tokens
    for at in range(len(whole) - len(plain) + 1):
        if whole[at : at + len(plain)] == plain:
            return tuple(whole[:at]), tuple(whole[at + len(plain) :])
    return (), ()


def _named(file: Path | None) -> str:
    """The eos_token of the files that are published beside a tokenizer; empty if they name none."""
    for name in ("tokenizer_config.json", "special_tokens_map.json") if file else ():
        try:
            token: Any = json.loads((Path(file or "").parent / name).read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError):
            continue
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return ""


def _vocab(tokenizer: Tokenizer) -> dict[str, int]:
    found: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return found


def ids_of(tokenizer: Tokenizer) -> int:
    """The greatest id of a token, plus 1; the library counts tokens, and ids may be left out."""
    return max(_vocab(tokenizer).values()) + 1


def make_corpus(texts: Iterable[str], tokenizer: Tokenizer, folder: Path, shard_tokens: int) -> Index:
    """Tokenise ``texts`` into shards of about ``shard_tokens`` tokens in ``folder``. Documents are never split.

    Raises DataError if there is no text, OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    framing = framing_of(tokenizer)
    tokenizer.save(str(folder / TOKENIZER))
    return commit_corpus(folder, tokenizer, framing, write_shards(texts, tokenizer, framing, folder, shard_tokens))


def commit_corpus(
    folder: Path, tokenizer: Tokenizer, framing: Framing, shards: Sequence[Shard], read: Tally | None = None
) -> Index:
    """Write the index of the ``shards`` in ``folder``. Raises DataError if there are none."""
    if not shards:
        raise DataError("the sources have no text")
    index = Index(
        ids_of(tokenizer), dtype_for(tokenizer), describe(folder / TOKENIZER), tuple(shards), framing=framing,
        read=read, made_by=made_by(),
    )  # fmt: skip
    write_index(folder, index)
    return index


def made_by() -> dict[str, str]:
    """A digest of the code that decides about tokens, and the versions of opsd and of the library."""
    files = (Path(__file__), Path(__file__).with_name("texts.py"))
    code = hashlib.blake2b(b"\0".join(file.read_bytes() for file in files), digest_size=8).hexdigest()
    return {"code": code, "opsd": __version__, "tokenizers": tokenizers.__version__}


def dtype_for(tokenizer: Tokenizer) -> str:
    """The smallest type for all ids."""
    return "uint16" if ids_of(tokenizer) <= 1 << 16 else "uint32"


def write_shards(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    framing: Framing,
    folder: Path,
    shard_tokens: int,
    prefix: str = "shard",
) -> list[Shard]:
    """Write the shards of ``texts`` durably, with names that begin with ``prefix``. Raises OSError."""
    # Text that happens to contain the marker must not begin a document. Turns of a chat begin with such tokens.
    tokenizer.encode_special_tokens = not framing.template
    writer = _ShardWriter(folder, prefix, dtype_for(tokenizer))
    shards: list[Shard] = []
    for document in _encode(texts, tokenizer, framing):
        writer.add(document)
        if writer.tokens >= shard_tokens:
            shards.append(writer.finish(len(shards)))
    if writer.tokens:
        shards.append(writer.finish(len(shards)))
    return shards


def _encode(texts: Iterable[str], tokenizer: Tokenizer, framing: Framing) -> Iterator[list[int]]:
    begin, end = ids(tokenizer, framing.begin), ids(tokenizer, framing.end)
    iterator = iter(texts)
    first = list(islice(iterator, BATCH_FILES))
    _check_coverage(first, tokenizer)
    iterator = chain(first, iterator)
    while batch := list(islice(iterator, BATCH_FILES)):
        for encoding in _encoded(tokenizer.encode_batch_fast, batch):
            yield [*begin, *encoding.ids, *end]


def _check_coverage(texts: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise DataError if the ``tokenizer`` leaves out characters of ``texts``, or has them as its unknown token."""
    unknown, lost = _unknown(tokenizer), 0
    for text, encoding in zip(texts, _encoded(tokenizer.encode_batch, texts), strict=True):
        known = (place for id_, place in zip(encoding.ids, encoding.offsets, strict=True) if id_ != unknown)
        lost += len(uncovered(text, known))
    total = sum(map(len, texts))
    if lost > MAX_UNCOVERED * total:
        raise DataError(
            f"the tokenizer has no token for {lost / total:.1%} of the characters of the first {len(texts)} documents; "
            "take one that was made for such text"
        )


def _encoded(encode: Callable[..., list[Any]], texts: Sequence[str]) -> list[Any]:
    """Raises DataError for a text that has no tokens at all in the tokenizer."""
    try:
        return encode(list(texts), add_special_tokens=False)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"the tokenizer cannot encode a document: {error}") from error


def _unknown(tokenizer: Tokenizer) -> int | None:
    """The id of what the model puts in the place of text that it does not know; None without one."""
    if isinstance(tokenizer.model, models.Unigram):
        return cast("int | None", json.loads(tokenizer.to_str())["model"].get("unk_id"))
    name = getattr(tokenizer.model, "unk_token", None)
    return None if name is None else tokenizer.token_to_id(name)


def uncovered(text: str, offsets: Iterable[tuple[int, int]]) -> str:
    """The characters of ``text``, but for white space, for which no token stands; ``offsets`` are the tokens'."""
    lost, at = "", 0
    for begin, end in offsets:
        if begin > at:
            lost += "".join(text[at:begin].split())
        at = max(at, end)
    return lost + "".join(text[at:].split())


def ids(tokenizer: Tokenizer, tokens: Iterable[str]) -> list[int]:
    """The ids of ``tokens``. Raises DataError if one has none."""
    found: list[int] = []
    for token in tokens:
        id_ = tokenizer.token_to_id(token)
        if id_ is None:
            raise DataError(f"the tokenizer has no token {token}, which the corpus has around its documents")
        found.append(id_)
    return found


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
    replace(path, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return describe(path)
