"""Raw rows of post-training data sets, in any of the formats that TRL documents, as turns of a conversation.

=================== ==============================================================================================
kind                columns
=================== ==============================================================================================
``chat``            ``messages`` (role, content), or ``conversations`` (from, value)
``completion``      ``prompt`` and ``completion``, texts or messages; of KTO with ``label``
``pair``            ``chosen`` and ``rejected``, texts or messages, with ``prompt`` or with the prompt within both
``prompt``          ``prompt`` only, for trainers that generate
``text``            ``text``
=================== ==============================================================================================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["chat", "completion", "pair", "prompt", "text"]
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system"}
EXCERPT = 48


@dataclass(frozen=True, slots=True)
class Turn:
    """One message; ``role`` is system, user, assistant, tool or text."""

    role: str
    text: str


Turns = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A raw row: what the model is given (``prompt``) and what it learns to answer.

    Of a ``chat`` all turns are in ``answer``. ``rejected`` is empty unless the kind is ``pair``.
    """

    number: int
    kind: Kind
    prompt: Turns
    answer: Turns
    rejected: Turns = ()

    @classmethod
    def of(cls, row: Mapping[str, Any], number: int) -> Example | None:
        """The row's turns, None for a format that is not known here, such as rows of tokens only."""
        prompt = _turns(row.get("prompt"), "user")
        if row.get("chosen") is not None and row.get("rejected") is not None:
            chosen, rejected = (_turns(row[name], "assistant") for name in ("chosen", "rejected"))
            return cls(number, "pair", prompt, chosen, rejected)
        if row.get("completion") is not None:
            return cls(number, "completion", prompt, _turns(row["completion"], "assistant"))
        for name in ("messages", "conversations"):
            if row.get(name):
                return cls(number, "chat", (), _turns(row[name], "text"))
        if prompt:
            return cls(number, "prompt", prompt, ())
        if isinstance(row.get("text"), str):
            return cls(number, "text", (), (Turn("text", row["text"]),))
        return None

    def texts(self, role: str, *, rejected: bool = False) -> list[str]:
        """The texts of one role in one side of the row."""
        answer = self.rejected if rejected else self.answer
        return [turn.text for turn in (*self.prompt, *answer) if turn.role == role and turn.text.strip()]

    def last_answer(self, *, rejected: bool = False) -> str:
        """The assistant's last text, without its reasoning, which templates may leave out."""
        answer = self.rejected if rejected else self.answer
        if not answer or answer[-1].role != "assistant":
            return ""
        return answer[-1].text.rpartition("</think>")[2]

    @property
    def name(self) -> str:
        """``row 17 ("The beginning of its text …")``."""
        turns = (*self.prompt, *self.answer)
        text = " ".join(turns[0].text.split()) if turns else ""
        return f'row {self.number} ("{text[:EXCERPT]}{"…" if len(text) > EXCERPT else ""}")'


def _turns(value: Any, role: str) -> Turns:
    """A text as a turn of ``role``, or a list of messages; nothing for what is neither."""
    if isinstance(value, str):
        return (Turn(role, value),)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        return ()
    found = []
    for message in value:
        if isinstance(message, Mapping):
            name = str(message.get("role") or message.get("from") or "")
            content = message["content"] if "content" in message else message.get("value")
            found.append(Turn(_ROLES.get(name, name), _text(content)))
    return tuple(found)


def _text(content: Any) -> str:
    """The text of a message, which may be a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return ""


def digest(row: Mapping[str, Any]) -> bytes:
    """Equal for rows that ask and answer the same, in any format; of rows of tokens, for equal tokens.

    Case, white space and system prompts do not count.
    """
    content: Any = (
        {"input_ids": [int(token) for token in row.get("input_ids", ())]} if "input_ids" in row else dict(row)
    )
    if (example := Example.of(row, 0)) is not None:
        sides = ((*example.prompt, *example.answer), example.rejected)
        content = [
            [(turn.role, " ".join(turn.text.casefold().split())) for turn in side if turn.role != "system"]
            for side in sides
        ]
    text = " ".join(json.dumps(content, sort_keys=True, default=str).split())
    return hashlib.blake2b(text.encode(), digest_size=12).digest()


def shared_rows(train: Iterable[Mapping[str, Any]], evaluation: Iterable[Mapping[str, Any]]) -> tuple[list[int], int]:
    """The numbers of the evaluation rows that the training data has as well, and how many were looked at."""
    wanted = [digest(row) for row in evaluation]
    known = frozenset(wanted)
    seen = {mark for row in train if (mark := digest(row)) in known}
    return [number for number, mark in enumerate(wanted) if mark in seen], len(wanted)
