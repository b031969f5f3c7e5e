"""Collated batches of post-training as sequences of tokens: what is in each, and which tokens are trained.

==================================================== ================================================================
a batch with                                         is read as
==================================================== ================================================================
``input_ids`` and ``labels``                         trained where the label is not -100 (SFT)
``input_ids`` and ``completion_mask``                trained where the mask is 1; of pairs the first half is chosen
``position_ids`` that begin again, or ``seq_idx``    several documents in one row (packing)
``prompt_ids`` and ``completion_ids``                what a trainer has generated, or is given to generate from
``chosen_input_ids``, ``rejected_input_ids``, …      pairs as separate tensors; ``prompt_input_ids`` before both
==================================================== ================================================================

Values are tensors or nested lists. ``attention_mask`` marks padding where it has two dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

IGNORED = -100
Side = Literal["", "chosen", "rejected", "prompt"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One document of a batch without its padding.

    ``labels`` is None where the batch has only a mask. ``begins``: it is the first of its row of the tensor; the others
    are packed behind it.
    """

    ids: list[int]
    trained: list[bool]
    side: Side = ""
    labels: list[int] | None = None
    begins: bool = True


@dataclass(frozen=True, slots=True)
class Words:
    """What the audit needs of a tokenizer. ``ends``: tokens at which generation stops.

    ``closing`` is the text that the chat template writes behind an answer, "" if there is none or no template.
    ``ends_by_turn``: it writes none, and a model stops where the next turn would begin (GLM).
    """

    decode: Callable[[list[int]], str]
    encode: Callable[[str], list[int]]
    bos: int | None = None
    ends: frozenset[int] = frozenset()
    closing: str = ""
    ends_by_turn: bool = False
    special: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def of(cls, tokenizer: Any, ends: Iterable[int] = (), template: str | None = None) -> Words:
        """Those of a tokenizer of transformers, or of a processor that has one. ``ends``: those of the model."""
        inner = getattr(tokenizer, "tokenizer", tokenizer)
        own = () if inner.eos_token_id is None else (inner.eos_token_id,)
        words = cls(
            decode=lambda ids: str(inner.decode(ids, skip_special_tokens=False)),
            encode=lambda text: list(inner.encode(text, add_special_tokens=False)),
            bos=inner.bos_token_id,
            ends=frozenset((*own, *ends)),
            special=frozenset(inner.all_special_ids),
        )
        closing, following = _behind_answer(inner, template)
        next_turn = words.encode(following)[:1]
        return replace(
            words,
            closing=squeeze(closing),
            ends_by_turn=not squeeze(closing) and words.ends.issuperset(next_turn or [-1]),
        )

    def plain(self, text: str) -> str:
        """``text`` as it comes back from tokens, without white space."""
        return squeeze(self.decode(self.encode(text)))


def squeeze(text: str) -> str:
    """``text`` without white space, which templates and tokenizers change."""
    return "".join(text.split())


def _behind_answer(tokenizer: Any, template: str | None) -> tuple[str, str]:
    """What the chat template writes behind the last answer, and behind one that a question follows."""
    if not (template or getattr(tokenizer, "chat_template", None)):
        return "", ""
    question, answer = "an opsd question", "an opsd answer"
    turns: list[tuple[str, Any]] = [("user", question), ("assistant", answer), ("user", question)]
    for in_parts in (False, True):
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text} for role, text in turns
        ]
        try:
            last, between = (
                str(tokenizer.apply_chat_template(messages[:count], tokenize=False, chat_template=template))
                for count in (2, 3)
            )
        except Exception:  # noqa: S112  # a template may refuse anything, in any way
            continue
        if answer in last:
            return last.rpartition(answer)[2], between.partition(answer)[2].lstrip()
    return "", ""


def read_batch(batch: Mapping[str, Any], *, pairs: bool = False) -> list[Tokens]:
    """The documents of a batch; ``pairs``: the first half of its rows is chosen, the second rejected.

    Raises ValueError if there is nothing in it that is known here, or if tensors disagree in shape.
    """
    if "chosen_input_ids" in batch and "rejected_input_ids" in batch:
        return [*_side(batch, "chosen"), *_side(batch, "rejected")]
    for name in ("input_ids", "prompt_completion_input_ids", "completion_input_ids"):
        if name in batch:
            return _documents(batch, name, pairs=pairs)
    if "prompt_ids" in batch:
        return _generated(batch)
    raise ValueError(
        f"a batch has {', '.join(sorted(map(str, batch))) or 'nothing'}, and no tokens that are known here"
    )


def is_language_batch(batch: Any) -> bool:
    """Whether the batch trains a language model: a label or a mask for each token, or generated tokens."""
    if not isinstance(batch, Mapping):
        return False
    if "prompt_ids" in batch or "chosen_input_ids" in batch:
        return True
    marks = [batch[name] for name in ("labels", "completion_mask", "completion_labels") if name in batch]
    ids = [name for name in batch if str(name).endswith("input_ids")]
    return bool(ids and marks) and _depth(marks[0]) == _depth(batch[ids[0]])


def _depth(values: Any) -> int:
    values = rows_of(values)
    depth = 0
    while isinstance(values, list):
        depth, values = depth + 1, values[0] if values else None
    return depth


def rows_of(values: Any) -> list[Any]:
    """A tensor, or a list, as a list."""
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)


def _documents(batch: Mapping[str, Any], name: str, *, pairs: bool) -> list[Tokens]:
    ids = rows_of(batch[name])
    labels = _like(batch, ("labels", "completion_labels", "prompt_completion_labels"), ids)
    mask = _like(batch, ("completion_mask",), ids)
    kept = _like(batch, ("attention_mask", name.replace("input_ids", "attention_mask")), ids)
    if labels is None and mask is None:
        raise ValueError("a batch has neither labels nor a completion_mask: nothing says which tokens are trained")
    found = []
    for row, tokens in enumerate(ids):
        own = labels[row] if labels is not None else None
        trained = [label != IGNORED for label in own] if own is not None else [bool(bit) for bit in (mask or ids)[row]]
        keep = [bool(bit) for bit in kept[row]] if kept is not None else [True] * len(tokens)
        side: Side = "" if not pairs else "chosen" if row < len(ids) // 2 else "rejected"
        starts, stop = _starts(batch, row, keep)
        for begin, end in zip(starts, [*starts[1:], stop], strict=True):
            places = [at for at in range(begin, end) if keep[at]]
            found.append(
                Tokens(
                    [tokens[at] for at in places],
                    [trained[at] for at in places],
                    side,
                    None if own is None else [own[at] for at in places],
                    begins=begin == 0,
                )
            )
    return found


def _like(batch: Mapping[str, Any], names: Iterable[str], ids: list[Any]) -> list[list[int]] | None:
    """The first of ``names`` that the batch has with two dimensions. Raises ValueError if its shape is not the ids'."""
    for name in names:
        if name in batch and batch[name] is not None and _depth(batch[name]) == 2:
            values = rows_of(batch[name])
            if [len(row) for row in values] != [len(row) for row in ids]:
                raise ValueError(f"{name} has not the shape of the tokens")
            return values
    return None


def _starts(batch: Mapping[str, Any], row: int, keep: list[bool]) -> tuple[list[int], int]:
    """Where documents begin in a row of the tensor, by what the batch says, and where the last of them ends."""
    length, starts, stop = len(keep), list[int](), len(keep)
    positions, index = (
        rows_of(batch[name])[row] if batch.get(name) is not None and row < len(batch[name]) else []
        for name in ("position_ids", "seq_idx")
    )
    if len(positions) == length:
        if all(keep):  # positions of padding at the end are 0, as those of a beginning
            stop = next((at for at in range(length, 0, -1) if positions[at - 1] != 0), length)
        starts = [at for at in range(stop) if positions[at] == 0 and keep[at]]
    elif len(index) == length:
        starts = [at for at in range(1, length) if index[at] != index[at - 1]]
    return sorted({0, *starts}), stop


def _side(batch: Mapping[str, Any], side: Literal["chosen", "rejected"]) -> list[Tokens]:
    """Pairs as separate tensors; ``SIDE_labels`` mean that the prompt is within."""
    ids, found = rows_of(batch[f"{side}_input_ids"]), []
    kept = _like(batch, (f"{side}_attention_mask",), ids)
    labels = _like(batch, (f"{side}_labels",), ids)
    prompts = _unpadded(batch, "prompt_input_ids", "prompt_attention_mask") if labels is None else None
    for row, tokens in enumerate(ids):
        places = [at for at in range(len(tokens)) if kept is None or kept[row][at]]
        before = prompts[row] if prompts is not None else []
        trained = [labels is None or labels[row][at] != IGNORED for at in places]
        found.append(Tokens(before + [tokens[at] for at in places], [False] * len(before) + trained, side))
    return found


def _unpadded(batch: Mapping[str, Any], name: str, mask: str) -> list[list[int]] | None:
    if name not in batch:
        return None
    ids = rows_of(batch[name])
    kept = _like(batch, (mask,), ids)
    return [[t for at, t in enumerate(row) if kept is None or kept[number][at]] for number, row in enumerate(ids)]


def _generated(batch: Mapping[str, Any]) -> list[Tokens]:
    """What is given to generate from; what was generated is the model's own and proves nothing of the data."""
    prompts = _unpadded(batch, "prompt_ids", "prompt_mask") or []
    return [Tokens(ids, [False] * len(ids), "prompt") for ids in prompts]
