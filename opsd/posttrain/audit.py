"""The audit of what a post-training trains on, and the dumps that it reads.

An audit of the first batches of a post-training, before its first step: is what is trained what the rows say?

Raw rows (``rows.py``) are compared with the documents of collated batches (``batches.py``). Texts are compared without
white space, as they come back from the tokenizer. Nothing here imports torch.

A finding refuses a run. Some faults are common in small numbers in data sets that are sound; they are findings above
the shares below, and notes otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from opsd.posttrain.batches import IGNORED, Tokens, Words, read_batch, squeeze
from opsd.posttrain.rows import Example, shared_rows
from opsd.words import plural

Expected = Literal["answers", "all", "auto"]

TRUNCATED_SHARE = 0.1
"""Of the answers that may be cut off: preference and chat sets have a tail of long rows that trainers truncate."""
EQUAL_SHARE = 0.05
"""Of the pairs whose sides may be equal: judges give equal answers."""
SHARED_SHARE = 0.01
"""Of the evaluation rows that may be in the training data: short questions repeat themselves."""
UNENDED_SHARE = 0.5
"""Of the answers that may end without a trained end token, as the earlier turns of a longer conversation do."""
TAIL = 6
"""Tokens at the end of a document among which its end token is, such as ``<|im_end|>`` and a new line."""
SHORTEST = 8
"""Characters of a text that is looked for: shorter ones occur anywhere."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``kind`` is a word for scripts, ``sentence`` says what is wrong in which row, ``advice`` what to do."""

    kind: str
    sentence: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.sentence} {self.advice}".strip()


@dataclass(slots=True)
class Report:
    """What an audit found; ``rows`` and ``documents`` are numbers of what it looked at."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows: int = 0
    documents: int = 0


@dataclass(frozen=True, slots=True)
class Matched:
    """A document with the row that it was made from, None if that is not known, and its texts without white space."""

    tokens: Tokens
    example: Example | None
    text: str
    trained: str
    """what is trained, a break between parts that do not touch"""

    @property
    def name(self) -> str:
        return self.example.name if self.example is not None else f'"{self.text[:40]}…"'

    @property
    def rejected(self) -> bool:
        return self.tokens.side == "rejected"

    def answer(self, words: Words) -> str:
        """The answer to be learned, without white space, "" if there is none."""
        return words.plain(self.example.last_answer(rejected=self.rejected)) if self.example is not None else ""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows and the documents that were made from them.

    ``aligned``: document i is of row i, of pairs the chosen ones before the rejected. Otherwise a document belongs to
    the row whose text it has.
    """

    examples: Sequence[Example | None]
    documents: Sequence[Tokens]
    aligned: bool = True


def audit(groups: Sequence[Group], words: Words, *, expected: Expected = "auto", longest: int | None = None) -> Report:
    """Compare rows with documents.

    ``expected`` is what the loss should cover, ``longest`` the trainer's limit of tokens.
    """
    report, matched, whole = Report(), list[Matched](), list[Matched]()
    for group in groups:
        report.rows, report.documents = report.rows + len(group.examples), report.documents + len(group.documents)
        found = (_align if group.aligned else _match)(group.examples, group.documents, words)
        matched += found
        whole += found if group.aligned else ()
    if unknown := sum(each.example is None for each in matched):
        report.notes.append(f"{unknown} of {plural(len(matched), 'document')} could not be compared with a raw row")
    checks: Iterable[Callable[[list[Matched], Words, Report], Iterator[Finding]]] = (
        _system_lost, _double_bos, _labels, _untrained, _pairs,
    )  # fmt: skip
    for check in checks:
        report.findings += check(matched, words, report)
    report.findings += _truncated(matched, words, report, longest)
    report.findings += _turns_lost(whole, words, report, longest)
    if not any(finding.kind in ("nothing_trained", "labels_shifted") for finding in report.findings):
        report.findings += _given_text_trained(matched, words, report, expected)
        report.findings += _ends(matched, words, report, longest)
    return report


def audit_overlap(train: Iterable[Mapping[str, Any]], evaluation: Iterable[Mapping[str, Any]], report: Report) -> None:
    """Add to ``report`` if evaluation rows are in the training data as well."""
    shared, total = shared_rows(train, evaluation)
    if not shared:
        return
    sentence = (
        f"{len(shared)} of {plural(total, 'evaluation row')} are in the training data, the first is row {shared[0]}."
    )
    if len(shared) / total > SHARED_SHARE:
        advice = "Remove them from one of both: the evaluation would measure what was learned by heart."
        report.findings.append(Finding("evaluation_in_training", sentence, advice))
    else:
        report.notes.append(sentence)


def _align(examples: Sequence[Example | None], documents: Sequence[Tokens], words: Words) -> list[Matched]:
    count = max(1, len(examples))
    return [_matched(tokens, examples[at % count] if examples else None, words) for at, tokens in enumerate(documents)]


def _match(examples: Sequence[Example | None], documents: Sequence[Tokens], words: Words) -> list[Matched]:
    """Each document with the row of the longest text that it has: an answer, or the last of a user."""
    keys = []
    for example in filter(None, examples):
        for rejected in (False, True) if example.kind == "pair" else (False,):
            texts = [example.last_answer(rejected=rejected), *example.texts("user")[-1:], *example.texts("text")]
            key = max((words.plain(text) for text in texts), key=len, default="")
            if len(key) >= SHORTEST:
                keys.append((key, example))
    keys.sort(key=lambda pair: -len(pair[0]))
    found = []
    for tokens in documents:
        text = squeeze(words.decode(tokens.ids))
        found.append(_matched(tokens, next((example for key, example in keys if key in text), None), words))
    return found


def _matched(tokens: Tokens, example: Example | None, words: Words) -> Matched:
    parts: list[list[int]] = []
    before = False
    for token, trained in zip(tokens.ids, tokens.trained, strict=True):
        if trained and not before:
            parts.append([])
        if trained:
            parts[-1].append(token)
        before = trained
    text = squeeze(words.decode(tokens.ids))
    return Matched(tokens, example, text, "\n".join(squeeze(words.decode(part)) for part in parts))


def _share(count: int, total: int, noun: str) -> str:
    return f"{count} of {plural(total, noun)}"


def _system_lost(matched: list[Matched], words: Words, report: Report) -> Iterator[Finding]:
    """A system prompt that the trainer never sees: templates and formatting functions drop it without a word."""
    with_system = lost = 0
    first: Matched | None = None
    for each in matched:
        texts = each.example.texts("system", rejected=each.rejected) if each.example is not None else []
        with_system += bool(texts)
        if any(_times(each, words.plain(text), words) < 1 for text in texts):
            lost, first = lost + 1, first or each
    if first is not None:
        yield Finding(
            "system_lost",
            f"The system prompt of {first.name} is not in its tokens, "
            f"as in {_share(lost, with_system, 'document')} with one.",
            "Look at the chat template and at the formatting function: one of them drops or cuts it.",
        )


def _times(each: Matched, system: str, words: Words) -> int:
    """How often the document has a system prompt beside the times that other turns have its words."""
    assert each.example is not None
    turns = (*each.example.prompt, *(each.example.rejected if each.rejected else each.example.answer))
    others = [words.plain(turn.text) for turn in turns if turn.role != "system"]
    return each.text.count(system) - sum(other.count(system) for other in others if other in each.text)


def _double_bos(matched: list[Matched], words: Words, report: Report) -> Iterator[Finding]:
    """Two beginnings: the template writes one, and the tokenizer adds another."""
    found = [each for each in matched if words.bos is not None and _head(each, words) == [words.bos, words.bos]]
    if found:
        yield Finding(
            "double_bos",
            f"{found[0].name} begins with two BOS tokens, as {_share(len(found), len(matched), 'document')}.",
            "Tokenize what the chat template has written with add_special_tokens=False.",
        )


def _head(each: Matched, words: Words) -> list[int]:
    """The first two tokens that are not white space."""
    first = each.tokens.ids[:TAIL]
    return [token for token in first if token == words.bos or squeeze(words.decode([token]))][:2]


def _labels(matched: list[Matched], words: Words, report: Report) -> Iterator[Finding]:
    """Labels are the tokens themselves: the model shifts them."""
    shifted = other = 0
    first: Matched | None = None
    for each in matched:
        ids, labels = each.tokens.ids, each.tokens.labels
        places = [at for at, label in enumerate(labels or ()) if label != IGNORED]
        wrong = [at for at in places if labels is not None and labels[at] != ids[at]]
        if len(places) >= 2 and len(wrong) * 2 > len(places) and labels is not None:
            first = first or each
            ahead = sum(at + 1 < len(ids) and labels[at] == ids[at + 1] for at in places)
            shifted, other = shifted + (ahead * 2 > len(places)), other + (ahead * 2 <= len(places))
    if first is not None and shifted:
        advice = "Leave them as the tokens are: the model shifts them itself, and would learn to skip a token."
        yield Finding("labels_shifted", f"The labels of {first.name} are one token ahead.", advice)
    elif first is not None:
        share = _share(other, len(matched), "document")
        sentence = f"The labels of {first.name} are other tokens than its own, as in {share}."
        yield Finding("labels_foreign", sentence, "Look at the collator: a causal model learns its own input.")


def _untrained(matched: list[Matched], words: Words, report: Report) -> Iterator[Finding]:
    """Documents of which no token is trained."""
    judged = [each for each in matched if each.tokens.side != "prompt"]
    empty = [each for each in judged if not any(each.tokens.trained)]
    if not empty:
        return
    sentence = f"No token of {empty[0].name} is trained, as of {_share(len(empty), len(judged), 'document')}."
    if len(empty) == len(judged):
        advice = (
            "Look at the mask of the loss: the marker that it looks for is not in the tokens, or all was truncated."
        )
        yield Finding("nothing_trained", sentence, advice)
    else:
        yield Finding("rows_untrained", sentence, "Drop such rows, or mend what leaves them without an answer.")


def _pairs(matched: list[Matched], words: Words, report: Report) -> Iterator[Finding]:
    """Pairs whose sides are equal, or answer different questions."""
    sides = {side: [each for each in matched if each.tokens.side == side] for side in ("chosen", "rejected")}
    pairs = list(zip(sides["chosen"], sides["rejected"], strict=False))
    equal = [chosen for chosen, rejected in pairs if chosen.text == rejected.text]
    if equal:
        sentence = f"Chosen and rejected are equal in {equal[0].name}, as in {_share(len(equal), len(pairs), 'pair')}."
        if len(equal) / len(pairs) > EQUAL_SHARE:
            yield Finding("pairs_equal", sentence, "Drop such pairs: they teach nothing.")
        else:
            report.notes.append(sentence)
    differ = [chosen for chosen, rejected in pairs if _questions_differ(chosen, rejected)]
    if differ:
        yield Finding(
            "prompts_differ",
            f"Chosen and rejected of {differ[0].name} answer different prompts, as in "
            f"{_share(len(differ), len(pairs), 'pair')}.",
            "Both must begin with the same messages up to the answer.",
        )


def _questions_differ(chosen: Matched, rejected: Matched) -> bool:
    example = chosen.example
    if example is not None and example.kind == "pair":
        left, right = example.answer, example.rejected
        for one, other in zip(left, right, strict=False):
            if one != other:
                return not one.role == other.role == "assistant"
    given = [
        each.tokens.ids[: next((at for at, bit in enumerate(each.tokens.trained) if bit), 0)]
        for each in (chosen, rejected)
    ]
    return given[0] != given[1] and all(any(each.tokens.trained) for each in (chosen, rejected))


def _truncated(matched: list[Matched], words: Words, report: Report, longest: int | None) -> Iterator[Finding]:
    """Answers of which the end is missing, or all."""
    answered = [(each, answer) for each in matched if len(answer := each.answer(words)) > 0]
    cut, lost = list[Matched](), list[Matched]()
    for each, answer in answered:
        if answer not in each.text:
            full = longest is not None and len(each.tokens.ids) >= longest
            (cut if full or _overlaps(each.text, answer) else lost).append(each)
    if lost:
        yield Finding(
            "answer_lost",
            f"The answer of {lost[0].name} is not in its tokens, as in {_share(len(lost), len(answered), 'document')}.",
            "Look at the chat template and at the formatting function.",
        )
    if cut:
        limit = f" at {longest} tokens" if longest is not None else ""
        sentence = (
            f"The answer of {cut[0].name} is cut off{limit}, as in {_share(len(cut), len(answered), 'document')}."
        )
        if len(cut) / len(answered) > TRUNCATED_SHARE:
            yield Finding("answers_truncated", sentence, "Raise max_length, or drop long rows.")
        else:
            report.notes.append(sentence)


def _turns_lost(matched: list[Matched], words: Words, report: Report, longest: int | None) -> Iterator[Finding]:
    """Earlier turns that a template or a formatting function leaves out."""
    judged, lost = 0, list[Matched]()
    for each in matched:
        full = longest is not None and len(each.tokens.ids) >= longest
        if full or each.example is None or each.example.kind == "text":
            continue
        answers = each.example.texts("assistant", rejected=each.rejected)[:-1]
        earlier = [*each.example.texts("user", rejected=each.rejected), *(a.rpartition("</think>")[2] for a in answers)]
        texts = [text for text in map(words.plain, earlier) if len(text) >= SHORTEST]
        judged += bool(texts)
        if any(text not in each.text for text in texts):
            lost.append(each)
    if not lost:
        return
    share = _share(len(lost), judged, "document")
    sentence = f"A question or an earlier answer of {lost[0].name} is not in its tokens, as in {share}."
    if len(lost) / judged > TRUNCATED_SHARE:
        advice = "Look at the chat template and at the formatting function: one of them drops turns."
        yield Finding("turns_lost", sentence, advice)
    else:
        report.notes.append(sentence)


def _overlaps(text: str, answer: str) -> bool:
    """Whether ``text`` ends in the beginning of ``answer``, or begins with its end: one of both was cut there."""
    least = min(len(answer), SHORTEST)
    return answer[:least] in text or answer[-least:] in text


def _given_text_trained(matched: list[Matched], words: Words, report: Report, expected: Expected) -> Iterator[Finding]:
    """Loss on what the model is given: the user's text, the system prompt, the prompt of a completion."""
    masked = [each for each in matched if _is_masked(each, words)]
    whole: list[Matched] = []
    judged, found, given = 0, list[Matched](), ""
    for each in matched:
        if each.example is None or each.example.kind in ("text", "prompt") or expected == "all":
            continue
        users, systems = (_given(each, role, words) for role in ("user", "system"))
        judged += bool(users or systems)
        answers = "\n".join(words.plain(text) for text in each.example.texts("assistant", rejected=each.rejected))
        trained = [each.trained.count(text) > answers.count(text) for text in users]
        by_user = bool(trained) and all(trained)
        if by_user or any(each.trained.count(text) > answers.count(text) for text in systems):
            auto = expected == "auto" and each.example.kind == "chat" and not masked
            (whole if auto else found).append(each)
            given = "the user's text" if by_user else "the system prompt"
    if found:
        yield Finding(
            "given_text_trained",
            f"The loss covers {given} of {found[0].name}, as in {_share(len(found), judged, 'document')}.",
            "Look at the mask of the loss (assistant_only_loss, completion_only_loss, the collator's labels).",
        )
    elif whole:
        report.notes.append(
            f"all tokens of {plural(len(whole), 'conversation')} are trained, the user's text as well "
            "(TRL: assistant_only_loss=False)"
        )


def _given(each: Matched, role: str, words: Words) -> list[str]:
    """Texts of the user or the system that are long enough to be found, without white space."""
    if each.example is None:
        return []
    texts = [words.plain(text) for text in each.example.texts(role, rejected=each.rejected)]
    return [text for text in texts if len(text) >= SHORTEST]


def _is_masked(each: Matched, words: Words) -> bool:
    """Whether a part of the document is kept from the loss on purpose: more than its first token and special ones."""
    own = list(zip(each.tokens.ids, each.tokens.trained, strict=True))[1:]
    skipped = words.special | words.ends
    return any(not trained and token not in skipped for token, trained in own)


def _ends(matched: list[Matched], words: Words, report: Report, longest: int | None) -> Iterator[Finding]:
    """An answer whose end is not trained never learns to stop."""
    judged, present, by_text, unended = 0, 0, 0, list[Matched]()
    for each in matched:
        answer = each.answer(words)
        full = longest is not None and len(each.tokens.ids) >= longest
        if each.example is None or full or not answer or answer not in each.text:
            continue
        judged += 1
        ids, trained = each.tokens.ids[-TAIL:], each.tokens.trained[-TAIL:]
        closing = bool(words.closing) and answer + words.closing in each.text
        present += closing or any(token in words.ends for token in ids)
        taught = any(token in words.ends and bit for token, bit in zip(ids, trained, strict=True))
        by_text += closing and not taught
        if not (taught or (closing and answer + words.closing in each.trained)):
            unended.append(each)
    if judged and by_text * 2 > judged:
        report.notes.append(
            f"answers end with {words.closing!r}, at which the tokenizer's eos_token does not stop: name it for the "
            "training (TRL: --eos_token), or where answers are generated"
        )
    plain = [each for each in matched if each.example is not None and each.example.kind == "text"]
    for each in plain:
        places = [at for at, token in enumerate(each.tokens.ids) if token in words.ends]
        if places:
            judged, present = judged + 1, present + 1
            if not any(each.tokens.trained[at] for at in places):
                unended.append(each)
    if not unended or len(unended) / judged <= UNENDED_SHARE:
        return
    share = _share(len(unended), judged, "document")
    if present * 2 > judged:
        yield Finding(
            "end_untrained",
            f"The end token of {unended[0].name} is not trained, as in {share}.",
            "The collator masks it with the padding: give the tokenizer a pad_token that is not its eos_token.",
        )
    elif words.ends_by_turn:
        report.notes.append(f"the chat template ends no answer, so {share} teach the model no end")
    else:
        yield Finding(
            "end_missing",
            f"There is no end token behind the answer of {unended[0].name}, as in {share}.",
            "Have the chat template, or the formatting function, write it: the model would not learn to stop.",
        )


# Batches of anybody's loader in a file, beside their raw rows: what ``opsd audit batches`` reads.
#
# The batches are ``.safetensors``, or ``.pt`` with a dict or a list of dicts of tensors, which is loaded without
# executing anything in it (``weights_only``). In a safetensors file of several batches the names are
# ``0.input_ids``, ``0.labels``, ``1.input_ids`` and so on. The rows are JSON lines, in the order of the batches if
# nothing is packed.


Batch = dict[str, Any]


class DumpError(Exception):
    """A file cannot be read as batches or rows; the message says which and why."""


def read_batches(path: Path) -> list[Batch]:
    """The batches in ``path``. Raises DumpError."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return _numbered(load_file(path))
        import torch

        loaded = torch.load(path, weights_only=True, map_location="cpu")
    except ImportError as error:
        raise DumpError(f"{path} needs {error.name}, which is not installed here") from error
    except Exception as error:  # a damaged file raises nearly anything
        said = str(error).strip().partition("\n")[0]
        raise DumpError(f"{path} cannot be read as .safetensors or .pt: {said:.200}") from error
    batches = loaded if isinstance(loaded, list) else [loaded]
    if not batches or not all(isinstance(batch, dict) for batch in batches):
        raise DumpError(f"{path} has neither a dict of tensors nor a list of such dicts")
    return batches


def _numbered(tensors: Mapping[str, Any]) -> list[Batch]:
    found: dict[int, Batch] = {}
    for name, value in tensors.items():
        number, dot, rest = name.partition(".")
        at = int(number) if dot and number.isdecimal() else 0
        found.setdefault(at, {})[rest if dot and number.isdecimal() else name] = value
    return [found[at] for at in sorted(found)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows in ``path``. Raises DumpError."""
    rows = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise DumpError(f"{path}:{number} is no JSON object")
                    rows.append(row)
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DumpError(f"{path} is no text in UTF-8") from error
    except ValueError as error:
        raise DumpError(f"{path}:{number} is no JSON object: {error}") from error
    return rows


def groups_of(batches: Sequence[Batch], rows: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Rows and documents: in their order if their numbers fit, else matched by text. Raises ValueError."""
    examples = [Example.of(row, number) for number, row in enumerate(rows)]
    pairs = bool(examples) and all(each is not None and each.kind == "pair" for each in examples)
    read = [read_batch(batch, pairs=pairs) for batch in batches]
    sides = 2 if any(document.side == "rejected" for documents in read for document in documents) else 1
    if sum(map(len, read)) != len(examples) * sides:
        return [Group(examples, [document for documents in read for document in documents], aligned=False)]
    groups, begin = [], 0
    for documents in read:
        count = len(documents) // sides
        groups.append(Group(examples[begin : begin + count], documents))
        begin += count
    return groups
