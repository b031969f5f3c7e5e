"""Tokenizers compared on the same sample of each language, and the cost of their vocabularies in a model.

==========  ====================================================================================================
figure      meaning
==========  ====================================================================================================
fertility   tokens for each word; words are separated by white space
continued   share of words that have more than one token
bytes       bytes of UTF-8 for each token
round trip  share of documents that come back from their tokens unchanged
==========  ====================================================================================================

A token belongs to a word if it has a character of it. Fertility and continued words are those of Rust et al. 2021,
arXiv:2012.15613. They have no meaning in scripts without spaces between words, and are None there.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from opsd.data.overlap import UNSPACED
from opsd.plan.forecast import HABITS
from opsd.plan.hardware import hardware_of
from opsd.plan.plan import plan_for_gpus
from opsd.plan.search import CannotPlan
from opsd.plan.source import read, tokens_of
from opsd.trainer import counts
from opsd.trainer.data.shards import DataError
from opsd.trainer.data.texts import read_texts
from opsd.trainer.data.tokenize import ids_of, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLE_BYTES: Final = 2_000_000
"""Of each language that are read."""
_BATCH: Final = 64
_WORD: Final = re.compile(r"\S+")
_UNSPACED: Final = re.compile(UNSPACED)
_MOST_UNSPACED: Final = 0.3
"""Share of letters of scripts without spaces from which on words are not counted."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A tokenizer on the sample of a language."""

    documents: int
    bytes: int
    tokens: int
    words: int | None
    fertility: float | None
    continued: float | None
    round_trip: float

    @property
    def bytes_per_token(self) -> float:
        """How much text a token stands for."""
        return self.bytes / self.tokens if self.tokens else 0.0


def sample_of(path: Path, most: int = SAMPLE_BYTES) -> list[str]:
    """The first documents of a file or folder, up to ``most`` bytes. Raises DataError."""
    from opsd.trainer.data.texts import find_files

    texts = list(read_texts(find_files([path]), most))
    if not texts:
        raise DataError(f"{path} has no document of at most {most:,} bytes; give a larger --bytes")
    return texts


def has_words(texts: Iterable[str]) -> bool:
    """Whether the language separates words by spaces."""
    letters = unspaced = 0
    for text in texts:
        unspaced += len(_UNSPACED.findall(text))
        letters += sum(map(str.isalpha, text))
    return unspaced <= _MOST_UNSPACED * letters


def figures(tokenizer: Tokenizer, texts: Sequence[str]) -> Figures:
    """The figures of a tokenizer on ``texts``. Raises DataError if it cannot encode one."""
    counted = has_words(texts)
    tokens = words = of_words = continued = same = 0
    for start in range(0, len(texts), _BATCH):
        batch = list(texts[start : start + _BATCH])
        try:
            encodings = tokenizer.encode_batch(batch, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"cannot encode a document: {error}") from error
        decoded = tokenizer.decode_batch([each.ids for each in encodings], skip_special_tokens=False)
        for text, encoding, back in zip(batch, encodings, decoded, strict=True):
            tokens += len(encoding.ids)
            same += text == back
            for number in _tokens_of_words(text, encoding.offsets) if counted else ():
                words += 1
                of_words += number
                continued += number > 1
    size = sum(len(text.encode()) for text in texts)
    return Figures(
        len(texts), size, tokens, words if counted else None, of_words / words if words else None,
        continued / words if words else None, same / len(texts) if texts else 0.0,
    )  # fmt: skip


def _tokens_of_words(text: str, offsets: Sequence[tuple[int, int]]) -> Iterable[int]:
    """For each word the number of tokens that have a character of it."""
    starts, ends = [begin for begin, _ in offsets], [end for _, end in offsets]
    for match in _WORD.finditer(text):
        yield bisect_left(starts, match.end()) - _first_after(ends, match.start())


def _first_after(ends: Sequence[int], at: int) -> int:
    """The first token that ends after ``at``; ends never fall."""
    return bisect_left(ends, at + 1)


@dataclass(frozen=True, slots=True)
class Compared:
    """A tokenizer: its ids, and its figures by language."""

    name: str
    ids: int
    by_language: Mapping[str, Figures]

    @property
    def bytes_per_token(self) -> float:
        """Over all languages of the sample, each with the same weight: the mean of their tokens per byte."""
        shares = [each.tokens / each.bytes for each in self.by_language.values() if each.bytes]
        return len(shares) / sum(shares) if shares and sum(shares) else 0.0


def compare(files: Sequence[Path], samples: Mapping[str, Sequence[str]]) -> list[Compared]:
    """The tokenizers of ``files``, folders or files of a tokenizer.json, on samples by language. Raises DataError."""
    found = []
    for file in files:
        path = file / "tokenizer.json" if file.is_dir() else file
        tokenizer = load_tokenizer(path)
        tokenizer.encode_special_tokens = True
        try:
            by_language = {language: figures(tokenizer, texts) for language, texts in samples.items()}
        except DataError as error:
            raise DataError(f"{path} {error}") from error
        found.append(Compared(str(file), ids_of(tokenizer), by_language))
    return found


def bars(title: str, groups: Mapping[str, Mapping[str, float | None]]) -> str:
    """Grouped horizontal bars as SVG: the value of each series, by group."""
    from opsd.charts import CHART_STYLE

    most = max((value or 0.0 for group in groups.values() for value in group.values()), default=0.0) or 1.0
    parts, at = [], 30
    for group, values in groups.items():
        parts.append(f'<text x="8" y="{at + 12}" font-weight="bold">{escape(group)}</text>')
        for number, (name, value) in enumerate(values.items()):
            at += 20
            told = "no words" if value is None else f"{value:.3g}"
            wide = 0.0 if value is None else 380 * value / most
            parts.append(f'<text x="8" y="{at + 12}">{escape(name[-28:])}</text>')
            parts.append(f'<path class="line s{number % 8}" style="stroke-width:12" d="M220 {at + 8}h{wide:.1f}"/>')
            parts.append(f'<text x="{226 + wide:.0f}" y="{at + 12}">{told}</text>')
        at += 28
    spoken = "; ".join(
        f"{group} {name} {'no words' if value is None else f'{value:.3g}'}"
        for group, values in groups.items() for name, value in values.items()
    )  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 720 {at}" role="img" '
        f'aria-label="{escape(title)}: {escape(spoken)}"><style>{CHART_STYLE}</style>'
        f'<text x="8" y="18">{escape(title)}</text>{"".join(parts)}</svg>'
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """A model with the ids of a tokenizer, on the text that the first tokenizer needs ``run.steps`` for.

    ``problem`` says why there is no plan; the figures of it are None then.
    """

    embeddings: int
    share: float
    tokens: float
    gpu_hours: float | None
    memory_gib: float | None
    problem: str = ""


def costs(source: str, gpus: int, compared: list[Compared]) -> list[Cost]:
    """The cost of each tokenizer in the run ``source``, a preset or a TOML file. Raises ConfigError."""
    config = read(source, (), None, gpus)
    wanted = float(tokens_of(config))
    text = wanted * compared[0].bytes_per_token
    found = []
    for each in compared:
        model = config.model.model_copy(update={"vocab": each.ids})
        own = config.model_copy(update={"model": model})
        tokens = text / each.bytes_per_token if each.bytes_per_token else wanted
        embeddings = counts.embedding_parameters(model)
        share = embeddings / counts.parameters(model)
        try:
            plan = plan_for_gpus(own, "h100", gpus, tokens, hardware_of("h100", model.dtype), HABITS)
            found.append(Cost(embeddings, share, tokens, plan.gpu_hours, plan.best.memory.total / (1 << 30)))
        except CannotPlan as error:
            found.append(Cost(embeddings, share, tokens, None, None, str(error)))
    return found
