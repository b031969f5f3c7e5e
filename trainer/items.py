"""Multiple-choice items: how they are asked, and which answers are right by which length. Imports no torch.

An item has a ``context``, ``choices`` that may follow it, and the number of the right one as ``answer``. As a cloze
(CF) each choice is scored as the continuation of the context. As a multiple choice (MCF) the choices stand in the text,
and their letters are scored. Scores and lengths are those of lm-evaluation-harness 0.4.13.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final

from opsd.trainer.data.shards import DataError
from opsd.words import plural

FIELDS: Final = ("context", "choices", "answer")
ASKS: Final = "Answer:"
"""Possible ends of a context; the choices of MCF stand before it."""


@dataclass(frozen=True, slots=True)
class Item:
    """A question; ``choices`` begin with what separates them from the ``context``, mostly a space."""

    context: str
    choices: tuple[str, ...]
    answer: int

    @property
    def as_letters(self) -> Item:
        """The same question with its choices in the text, each behind a letter, which is to be named.

        Raises DataError if the alphabet is too short.
        """
        check_letters([self])
        letters = ascii_uppercase[: len(self.choices)]
        listed = "".join(f"\n {letter}. {choice.strip()}" for letter, choice in zip(letters, self.choices, strict=True))
        question = self.context.rstrip().removesuffix(ASKS).rstrip()
        return Item(f"{question}{listed}\n{ASKS}", tuple(f" {letter}" for letter in letters), self.answer)


@dataclass(frozen=True, slots=True)
class Score:
    """What the model makes of an item: of each choice the log-likelihood in nats, and its length.

    White space before a choice does not count to its characters and bytes.
    """

    answer: int
    log_likelihoods: tuple[float, ...]
    tokens: tuple[int, ...]
    characters: tuple[int, ...]
    bytes: tuple[int, ...]

    @classmethod
    def of(cls, item: Item, log_likelihoods: Sequence[Sequence[float]]) -> Score:
        """The score of ``item`` whose choices have tokens of these log-likelihoods."""
        texts = [choice.lstrip() or choice for choice in item.choices]
        return cls(
            item.answer,
            tuple(math.fsum(each) for each in log_likelihoods),
            tuple(map(len, log_likelihoods)),
            tuple(map(len, texts)),
            tuple(len(text.encode()) for text in texts),
        )

    def is_right(self, lengths: Sequence[int] | None = None) -> bool:
        """Whether the right choice is the likeliest, by itself or per unit of ``lengths``; the first of equal ones."""
        values = [
            value / length
            for value, length in zip(self.log_likelihoods, lengths or [1] * len(self.tokens), strict=True)
        ]
        return values.index(max(values)) == self.answer


def accuracies(scores: Sequence[Score], name: str, *, letters: bool = False) -> dict[str, float]:
    """The shares of right answers. Raises DataError if there are no ``scores``.

    ``NAME_accuracy`` is per byte (lm-evaluation-harness: acc_bytes), ``NAME_accuracy_norm`` per character (acc_norm)
    and ``NAME_accuracy_raw`` by the likelihood alone (acc). For ``letters`` only the likelihood counts, and the result
    is ``NAME_mc_accuracy``.
    """
    if not scores:
        raise DataError(f"the evaluation set {name} has no items")
    raw = [score.is_right() for score in scores]
    if letters:
        return {f"{name}_mc_accuracy": _mean(raw)}
    return {
        f"{name}_accuracy": _mean([score.is_right(score.bytes) for score in scores]),
        f"{name}_accuracy_norm": _mean([score.is_right(score.characters) for score in scores]),
        f"{name}_accuracy_raw": _mean(raw),
    }


def _mean(right: Sequence[bool]) -> float:
    return sum(right) / len(right)


def standard_error(share: float, count: int) -> float:
    """Of a ``share`` of ``count`` items, from their sample variance."""
    return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else 0.0


def write_scores(path: Path, scores: Iterable[Score]) -> None:
    """One JSON line for each item, in the order of the set. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"item": number, **asdict(score)}) + "\n" for number, score in enumerate(scores, 1))
    path.write_text("".join(lines), encoding="utf-8")


def check_letters(items: Iterable[Item]) -> None:
    """Raises DataError for an item with more choices than there are letters."""
    most = max((len(item.choices) for item in items), default=0)
    if most > len(ascii_uppercase):
        raise DataError(f"an item has {most} choices, more than there are letters")


def read_items(path: Path) -> list[Item]:
    """The items of a set. Raises DataError naming an invalid line."""
    items = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            items.append(_item(json.loads(line)))
        except (ValueError, RecursionError) as error:
            why = f"no cloze item with context, choices and answer: {error}"
            raise DataError(f"{path}, line {number}: {why}") from error
    return items


def _item(raw: Any) -> Item:
    """Raises ValueError."""
    context, choices, answer = (raw.get(key) for key in FIELDS) if isinstance(raw, dict) else (None, None, None)
    if not isinstance(context, str):
        raise ValueError("the context is no text")
    if not (isinstance(choices, list) and all(choice and isinstance(choice, str) for choice in choices)):
        raise ValueError("the choices are no list of texts that have characters")
    if len(choices) < 2:
        raise ValueError(f"it has {plural(len(choices), 'choice')}, which leaves nothing to choose")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"the answer is no whole number from 0 to {len(choices) - 1}")
    for text in (context, *choices):
        text.encode()  # half of a character raises UnicodeEncodeError, which is a ValueError
    return Item(context, tuple(choices), answer)
