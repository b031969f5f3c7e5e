"""What a checkpoint does with a chat, in numbers: does it follow its system prompt, stop, repeat, keep to its template?

============== ========================================================================================================
divergence     how far the next tokens move when the system prompt is left out: Jensen-Shannon divergence in bits, from
               0 (equal) to 1, mean over the first ``COMPARED`` tokens of the answer with it
gain           only with rows: by how many nats a token of the rows' own answers is likelier under the row's own system
               prompt than under another row's. A model that never saw system prompts has none, whatever its divergence
stops          share of the answers that end by themselves
repeats        share of the answers in which more than half of the four-token sequences have been there before
strays         share of the answers that write a mark of the template, such as the beginning of another turn
============== ========================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from opsd.posttrain.rows import Example
from opsd.posttrain.speaker import Messages, Speaker, SpeakerError

COMPARED = 8
LEAST_ROWS = 8
LEAST_GAIN, LEAST_SCORE = 0.01, 3.0
"""Nats a token, and standard errors, above which a gain is one."""
MOST_ROWS = 64
REPEATED, SPAN = 0.5, 4
Verdict = Literal["yes", "no", "unknown"]

SYSTEMS = (
    "Answer in French only.", "Answer in capital letters only.", "You are a pirate and speak like one.",
    "Answer every question with exactly one word.",
)  # fmt: skip
QUESTIONS = (
    "What is the capital of Italy?",
    "How do I boil an egg?",
    "Tell me about the sea.",
    "What is seven plus five?",
)


@dataclass(frozen=True, slots=True)
class Vibe:
    """The numbers of one checkpoint; None where they could not be measured.

    ``dropped``: its template leaves the system prompt out. ``refused``: what it says instead of taking one.
    """

    name: str
    divergence: float | None
    gain: float | None
    gain_error: float | None
    dropped: bool
    stops: float
    repeats: float
    strays: float
    answers: int
    refused: str = ""
    templated: bool = True

    @property
    def follows(self) -> Verdict:
        """Whether the model follows its system prompt; that its output moves does not prove it."""
        if self.dropped or self.refused:
            return "no"
        if self.gain is not None and self.gain_error is not None:
            return "yes" if self.gain >= LEAST_GAIN and self.gain >= LEAST_SCORE * self.gain_error else "no"
        return "no" if self.divergence is not None and self.divergence < LEAST_GAIN else "unknown"

    @property
    def problems(self) -> list[str]:
        """What is wrong, in words."""
        found = []
        if not self.templated:
            found.append("it has no chat template and continues texts")
        if self.refused:
            found.append(f"it takes no system prompt: {self.refused}")
        elif self.follows == "no":
            found.append(
                "its chat template drops the system prompt" if self.dropped else "it ignores its system prompt"
            )
        if self.stops < 0.5:
            found.append("most answers do not end")
        if self.repeats > 0.5:
            found.append("most answers repeat themselves")
        if self.strays > 0.5:
            found.append("most answers write marks of the template")
        return found


def usable(examples: Iterable[Example | None]) -> list[Example]:
    """Those with a system prompt, a question and an answer."""
    return [each for each in examples if each is not None and _system(each) and each.last_answer() and _question(each)]


def measure(speaker: Speaker, examples: Sequence[Example] = (), *, most: int = 128) -> Vibe:
    """Put questions to ``speaker``: those of ``examples`` with a system prompt, or built-in ones.

    ``most`` is the limit of tokens of an answer. Raises SpeakerError if the template refuses all of them.
    """
    rows = usable(examples)[:MOST_ROWS]
    asked = [_given(each) for each in rows] or [_messages(s, q) for s in SYSTEMS for q in QUESTIONS]
    refusals = [_refusal(speaker, each) for each in asked]
    if taken := [each for each, refusal in zip(asked, refusals, strict=True) if not refusal]:
        return _judge(speaker, taken, rows, most)
    without = [each[1:] for each in asked]
    taken = [each for each in without if not _refusal(speaker, each)] or without
    return replace(_judge(speaker, taken, [], most), refused=refusals[0])


def _refusal(speaker: Speaker, messages: Messages) -> str:
    try:
        speaker.prompt(messages)
    except SpeakerError as error:
        return str(error)
    return ""


def _judge(speaker: Speaker, asked: Sequence[Messages], rows: Sequence[Example], most: int) -> Vibe:
    with_system = [each for each in asked if each[0]["role"] == "system"]
    answers = [speaker.answer(messages, most=most) for messages in asked[: 2 * LEAST_ROWS]]
    moved = [divergence(speaker, messages, answer.ids) for messages, answer in zip(with_system, answers, strict=False)]
    known = [each for each in moved if each is not None]
    gain, error = gain_of(speaker, rows) if len(rows) >= LEAST_ROWS else (None, None)
    marks = frozenset(speaker.tokenizer.all_special_ids) - speaker.ends
    count = max(1, len(answers))
    return Vibe(
        speaker.name,
        divergence=sum(known) / len(known) if known else None,
        gain=gain,
        gain_error=error,
        dropped=bool(with_system) and all(speaker.prompt(each) == speaker.prompt(each[1:]) for each in with_system),
        stops=sum(each.stopped for each in answers) / count,
        repeats=sum(repeated(each.ids) > REPEATED for each in answers) / count,
        strays=sum(not marks.isdisjoint(each.ids) for each in answers) / count,
        answers=len(answers),
        templated=speaker.has_template,
    )


def _messages(system: str, question: str) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def _system(example: Example) -> str:
    return "\n".join(example.texts("system"))


def _question(example: Example) -> str:
    return (example.texts("user") or [""])[-1]


def _given(example: Example) -> Messages:
    return _messages(_system(example), _question(example))


def divergence(speaker: Speaker, messages: Messages, answer: Sequence[int]) -> float | None:
    """See the head of this file; None for an empty answer."""
    answer = list(answer[:COMPARED])
    if not answer:
        return None
    found = []
    for given in (messages, messages[1:]):
        prompt = speaker.prompt(given)
        found.append(speaker.log_probabilities([*prompt, *answer], len(prompt)))
    middle = torch.logaddexp(*found) - math.log(2)
    halves = [(each.exp() * (each - middle)).sum(-1) for each in found]
    return max(0.0, float((halves[0] + halves[1]).mean() / 2 / math.log(2)))


def gain_of(speaker: Speaker, rows: Sequence[Example]) -> tuple[float | None, float | None]:
    """The gain in nats a token, and its standard error over rows; None without two rows that the model can read."""
    gains = []
    for number, row in enumerate(rows):
        others = [other for other in (*rows[number + 1 :], *rows[:number]) if _system(other) != _system(row)]
        if others:
            with suppress(SpeakerError):  # a row may be longer than the model's positions
                own = _cost(speaker, _given(row), row.last_answer())
                gains.append(_cost(speaker, _messages(_system(others[0]), _question(row)), row.last_answer()) - own)
    if len(gains) < 2:
        return None, None
    mean = sum(gains) / len(gains)
    variance = sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1)
    return mean, math.sqrt(variance / len(gains))


def _cost(speaker: Speaker, messages: Messages, answer: str) -> float:
    """Nats a token of ``answer``."""
    prompt = speaker.prompt(messages)
    ids = [*prompt, *speaker.tokenizer(answer, add_special_tokens=False)["input_ids"]]
    found = speaker.log_probabilities(ids, len(prompt))
    own = torch.tensor(ids[len(prompt) :], device=found.device)
    return float(-found.gather(1, own[:, None]).mean())


def repeated(ids: Sequence[int]) -> float:
    """The share of the sequences of ``SPAN`` tokens that have been there before; 0.0 for short answers."""
    spans = [tuple(ids[at : at + SPAN]) for at in range(len(ids) - SPAN + 1)]
    return 1 - len(set(spans)) / len(spans) if len(spans) >= 2 * SPAN else 0.0


def described(vibe: Vibe) -> Mapping[str, Any]:
    """For JSON."""
    numbers = {name: getattr(vibe, name) for name in Vibe.__slots__}
    return {**numbers, "follows": vibe.follows, "problems": vibe.problems}
