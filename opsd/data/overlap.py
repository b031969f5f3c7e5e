"""Overlap of training data: with the run's own evaluation sets, and near-duplicates of the documents of a sample.

Nothing is removed: both are reported with the texts. Texts are compared by words in lower case without punctuation. In
scripts without spaces each character is a word. A document overlaps with an item if 13 words in a row are the same, as
in GPT-3 (Brown et al. 2020, appendix C). An item of fewer words is looked for as a whole, if it has at least five.

Near-duplicates are those of datatrove's MinHash: signatures that agree in all hashes of a bucket. With b buckets of r
hashes, a pair of documents with Jaccard similarity s of their n-grams is found with probability 1 - (1 - s^r)^b.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opsd.trainer.data.texts import read_texts
from opsd.trainer.items import read_items

if TYPE_CHECKING:
    from opsd.trainer.config import Config

WORDS: Final = 13
LEAST_WORDS: Final = 5
UNSPACED: Final = (
    "[\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0002ffff]"
)
"""A character of a script without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Japanese, Chinese."""
_INVISIBLE: Final = re.compile("[\u00ad\u200c\u200d\u2060\ufeff]")
"""Characters within words that are not seen: soft hyphens, joiners."""
_WORD: Final = re.compile(rf"{UNSPACED}|\w+")


@dataclass(frozen=True, slots=True)
class Item:
    """A text of an evaluation set; ``number`` counts from 0 within the set ``name``."""

    name: str
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """An overlap of a document with an item: the words that both have in a row."""

    item: Item
    words: str


def words_of(text: str) -> list[str]:
    """The words by which texts are compared."""
    seen = text if text.isascii() else _INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
    found: list[str] = _WORD.findall(seen.lower())
    return found


def evaluation_items(config: Config) -> list[Item]:
    """The texts of all evaluation sets of a run: texts, and contexts with each choice. Raises DataError."""
    found = []
    for name, path in config.evaluation.perplexity.items():
        found += [Item(name, number, text) for number, text in enumerate(read_texts([Path(path)]))]
    for name, path in {**config.evaluation.cloze, **config.evaluation.multiple_choice}.items():
        for number, item in enumerate(read_items(Path(path))):
            right = item.context + item.choices[item.answer]
            found += [Item(name, number, text) for text in dict.fromkeys((item.context, right))]
    return found


@dataclass
class Evaluations:
    """Looks for items in documents. ``short`` are those with too few words to be looked for."""

    items: Iterable[Item]
    words: int = WORDS
    short: list[Item] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._items: list[Item] = []
        self._grams: dict[int, dict[str, int]] = {}
        """By the number of words: the words, and the item that has them first."""
        for item in self.items:
            words = words_of(item.text)
            length = min(self.words, len(words))
            if length < LEAST_WORDS:
                self.short.append(item)
                continue
            of_length = self._grams.setdefault(length, {})
            for gram in _grams(words, length):
                of_length.setdefault(gram, len(self._items))
            self._items.append(item)

    def __len__(self) -> int:
        """How many items are looked for."""
        return len(self._items)

    def look(self, text: str) -> list[Found]:
        """The items that the document overlaps with, each once."""
        words = words_of(text)
        found: dict[int, Found] = {}
        for length, known in self._grams.items():
            for gram in _grams(words, length):
                if (number := known.get(gram)) is not None and number not in found:
                    found[number] = Found(self._items[number], gram)
        return list(found.values())


def _grams(words: Sequence[str], length: int) -> Iterator[str]:
    return (" ".join(words[at : at + length]) for at in range(len(words) - length + 1))


class NearDuplicates:
    """Looks for documents that are nearly those of a sample, by the signatures of datatrove's MinHash.

    ``settings`` are fields of its MinhashConfig, such as n_grams, num_buckets and hashes_per_bucket.
    """

    def __init__(self, sample: Iterable[str], settings: Mapping[str, Any] | None = None) -> None:
        from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
        from datatrove.utils.hashing import HashConfig
        from datatrove.utils.word_tokenizers import WordTokenizer

        class Words(WordTokenizer):  # type: ignore[misc]  # datatrove has no types
            """Splits words as this module does; those of datatrove need packages for each language."""

            def word_tokenize(self, text: str) -> list[str]:
                return words_of(text)

            def sent_tokenize(self, text: str) -> list[str]:
                return [text]

            def span_tokenize(self, text: str) -> list[tuple[int, int]]:
                return [(0, len(text))]

        self.config = MinhashConfig(hash_config=HashConfig(64, "sha1"), **(settings or {}))
        self._step = MinhashDedupSignature("/nowhere", self.config, Words())
        self.sample: list[str] = []
        self._buckets: list[dict[tuple[int, ...], int]] = [{} for _ in range(self.config.num_buckets)]
        for text in sample:
            for bucket, signature in zip(self._buckets, self._signatures(text), strict=False):
                bucket.setdefault(signature, len(self.sample))
            self.sample.append(text)

    def _signatures(self, text: str) -> list[tuple[int, ...]]:
        shingles = self._step.get_shingles(text)
        return [tuple(each) for each in self._step.get_signature(shingles)] if shingles.size else []

    def look(self, text: str) -> list[str]:
        """The texts of the sample that the document is nearly the same as, each once."""
        numbers = (b.get(s) for b, s in zip(self._buckets, self._signatures(text), strict=False))
        return [self.sample[number] for number in dict.fromkeys(n for n in numbers if n is not None)]


def report(
    texts: Iterable[str], evaluations: Evaluations | None, near: NearDuplicates | None
) -> Iterator[dict[str, Any]]:
    """For each document that overlaps, in JSON: its number, its text, and what it overlaps with."""
    for number, text in enumerate(texts):
        items = evaluations.look(text) if evaluations is not None else []
        alike = near.look(text) if near is not None else []
        if items or alike:
            yield {
                "document": number, "text": text,
                "evaluations": [{"set": each.item.name, "item": each.item.number, "words": each.words,
                                 "text": each.item.text} for each in items],
                "near_duplicates_of": alike,
            }  # fmt: skip
