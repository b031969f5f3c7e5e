"""Sentences of documentation and code that a reader may have to read twice."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 28
"""The style asks for 25. A few more are not worth an alarm."""
MOST_COMMAS = 4
ODD = (
    "anew", "is no matter for", "of nobody", "nobody's", "such a one", "is told", "are told", "was told", "tells of",
    "in the way of", "stands for", "goes by", "is of no", "are of no", "took part", "whose word", "for good and",
)  # fmt: skip
"""Phrases for which there is a plainer word."""
_ODD = re.compile(rf"\b(?:{'|'.join(ODD)})\b", re.IGNORECASE)
_RIDDLE = re.compile(r"(?:What|Who|Whoever|Where)\b[^,.:?]{3,60}\b(?:is|are|has|have|was|were|does|do|can|may)\b")
_HEADING = re.compile(r"What (?:is|are|to)\b")
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\x00])")


def sentences(text: str) -> list[str]:
    """Code becomes one word, and a link its text."""
    plain = re.sub(r"`+[^`]*`+", "\0", re.sub(r"\]\([^)]*\)", "]", text))
    return [each for part in _END.split(" ".join(plain.split())) if (each := part.strip())]


def hard(sentence: str) -> bool:
    """Too long, with too many commas but those of lists of code, a phrase of ``ODD``, or a question that is none."""
    commas = sentence.replace("\0,", "").count(",")
    if len(sentence.split()) > MOST_WORDS or commas > MOST_COMMAS or _ODD.search(sentence):
        return True
    return bool(_RIDDLE.match(sentence)) and not sentence.endswith("?") and not _HEADING.match(sentence)


def prose(path: Path) -> Iterator[str]:
    """Paragraphs and items of Markdown, or docstrings and comments of Python, without tables, headings and code."""
    text = path.read_text(encoding="utf-8")
    yield from _python(text) if path.suffix == ".py" else _markdown(text)


def _markdown(text: str) -> Iterator[str]:
    text = re.sub(r"^ *```.*?^ *```[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if not block.lstrip().startswith(("|", "#", "<", "!")):
            yield re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block)


def _python(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(words))):
                parts = inspect.cleandoc(words).split("\n\n")
                yield from (part for part in parts if not part.startswith("    ") and "====" not in part)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#!: ")


def judged(paths: list[Path]) -> tuple[list[str], int]:
    """The hard sentences of some files, with the name of the file, and how many sentences there are."""
    found, total = [], 0
    for path in paths:
        for part in prose(path):
            for sentence in sentences(part):
                total += 1
                if hard(sentence):
                    found.append(f"{path.name}: {sentence}")
    return found, total
