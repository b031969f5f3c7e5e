"""The audit's note about an end of answers at which the model does not stop."""

from __future__ import annotations

import pytest

from opsd.posttrain.audit import Group, audit
from opsd.posttrain.batches import Tokens, Words
from opsd.posttrain.rows import Example

MARK, EOS = 256, 257
"""The tokens of ``<|im_end|>`` and ``<|endoftext|>``; the others are bytes."""
MARKS = {MARK: "<|im_end|>", EOS: "<|endoftext|>"}
ANSWER = "It stands behind the door."
NOTE = "answers end with '<|im_end|>', at which the tokenizer's eos_token does not stop"


def decode(ids: list[int]) -> str:
    return "".join(MARKS.get(each) or chr(each) for each in ids)


def encode(text: str) -> list[int]:
    return [ord(each) for each in text]


def group(end: list[int], *, trained: bool = True, count: int = 4) -> Group:
    """Conversations whose answers end with the tokens ``end``."""
    examples, documents = [], []
    for number in range(count):
        question = f"Question {number}: where is the clock?"
        row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWER}]}
        ids = [*encode(question), MARK, *encode(ANSWER), *end]
        given = len(question) + 1
        bits = [False] * given + [True] * len(ANSWER) + [trained] * len(end)
        examples.append(Example.of(row, number))
        documents.append(Tokens(ids, bits, labels=[i if b else -100 for i, b in zip(ids, bits, strict=True)]))
    return Group(examples, documents)


@pytest.mark.parametrize(
    ("ends", "groups", "noted"),
    [
        ({EOS}, [group([MARK])], True),
        ({EOS}, [group([MARK, 10])], True),
        ({EOS}, [group([MARK], count=3), group([MARK, EOS], count=2)], True),
        ({MARK}, [group([MARK])], False),
        ({MARK, EOS}, [group([MARK])], False),  # the model's generation_config may have several
        ({EOS}, [group([MARK, EOS])], False),
        ({EOS}, [group([MARK], count=2), group([MARK, EOS], count=3)], False),
    ],
)
def test_an_end_at_which_the_model_does_not_stop_is_noted(ends: set[int], groups: list[Group], noted: bool) -> None:
    """A template ends answers with one token, and the tokenizer stops at another: for most answers that is said."""
    report = audit(groups, Words(decode, encode, ends=frozenset(ends), closing="<|im_end|>"))
    assert not report.findings
    assert [note for note in report.notes if note.startswith(NOTE)] == report.notes
    assert bool(report.notes) is noted


@pytest.mark.parametrize(
    ("answered", "kind", "noted"),
    [(group([MARK], trained=False), "end_untrained", True), (group([]), "end_missing", False)],
)
def test_an_end_that_is_not_learned_is_a_finding(answered: Group, kind: str, noted: bool) -> None:
    """The collator masks the mark, or the template does not write it: the model learns no end at all."""
    report = audit([answered], Words(decode, encode, ends=frozenset({EOS}), closing="<|im_end|>"))
    assert [finding.kind for finding in report.findings] == [kind]
    assert bool(report.notes) is noted
