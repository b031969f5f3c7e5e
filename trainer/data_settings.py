"""The section [data] of a run's settings: which tokens, in which order, and in sequences of which length.

A run may have several shapes, one after the other: the batch grows, then stages make sequences longer. All of them
begin at a step, and everything about them follows from the step or the number of samples alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, Strict

from opsd.trainer.data.stages import MixtureError, Stage
from opsd.trainer.model_settings import Section

if TYPE_CHECKING:
    from opsd.trainer.data.mixture import Mixture

_Steps = Annotated[tuple[PositiveInt, PositiveInt], Strict(False)]
_SIZES: Final = ("sequence", "batch", "micro_batch")
_ROPE: Final = ("rope_theta", "yarn_factor", "yarn_positions")
_ENDLESS: Final = 1 << 62
ONLY: Final = "."
"""The source that is the folder of the shards itself."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the steps from ``start`` on, until the next shape.

    ``rope`` are settings of [model] that it has in place of those of the run.
    """

    start: int
    sequence: int
    batch: int
    micro_batch: int
    rope: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """A source as sequences of ``length`` tokens: all of its text, or only what is ``within`` long documents."""

    source: str
    length: int
    within: bool = False


class StageSettings(Section):
    """From step ``start`` on, counted from 1. What is left out, or 0, is as in the stage before."""

    start: PositiveInt
    weights: dict[str, NonNegativeFloat] = {}  # noqa: RUF012 -- pydantic copies it
    long_documents: dict[str, Annotated[float, Field(gt=0, le=1)]] = {}  # noqa: RUF012
    sequence: NonNegativeInt = 0
    batch: NonNegativeInt = 0
    micro_batch: NonNegativeInt = 0
    rope_theta: NonNegativeFloat = 0.0
    yarn_factor: NonNegativeFloat = 0.0
    yarn_positions: NonNegativeInt = 0

    def changes(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Those of its settings ``names`` that it has."""
        return {name: value for name in names if (value := getattr(self, name))}


class DataSettings(Section):
    """Which token shards, in which order."""

    shards: str = ""
    """Folder of the corpus; with stages, the folder with one corpus per source, by name."""
    fallback: str = ""
    """The same on slower storage, used file by file if ``shards`` (on the node, for instance) has none."""
    tokenizer: str = ""
    """A tokenizer.json that the shards must have been made with; empty skips the comparison."""
    chat_template: str = ""
    """A Jinja template that the chats of the shards must have been rendered with; empty skips the comparison."""
    mixture: str = ""
    """A TOML file with ``[[stages]]``, or the name of a preset (smollm3); empty for the stages given here."""
    stages: Annotated[tuple[StageSettings, ...], Strict(False)] = ()
    """Each with ``start``, its first step, counted from 1, and ``weights``, the share of each source; they sum to 1.

    A stage may also change ``sequence``, ``batch`` and ``micro_batch``, and of the model ``rope_theta``,
    ``yarn_factor`` and ``yarn_positions``; what it leaves out stays as before. ``long_documents`` says which share of a
    source's samples is cut from documents of at least a sequence, each sample from one of them.
    """
    skip: Annotated[tuple[_Steps, ...], Strict(False)] = ()
    """Pairs of steps, first and last: their batches are skipped and the next ones take their place, e.g. after a loss
    spike.

    Each pair counts steps with the pairs before it applied. Stages begin at their steps all the same.
    """
    sequence: PositiveInt
    """Tokens of a sequence."""
    batch: PositiveInt
    """Sequences of a step over all ranks, whatever their number."""
    batch_warmup: Annotated[tuple[_Steps, ...], Strict(False)] = ()
    """Pairs (step, batch): the global batch up to and including that step; afterwards ``batch``."""
    micro_batch: PositiveInt
    """Sequences that a rank computes at once; the rest of its share is accumulated."""
    prefetch: PositiveInt = 4
    """Micro-batches that the data worker keeps ready."""
    verify: Literal["checksum", "size"] = "checksum"
    """What is compared with the index at start; ``size`` for corpora too large to read."""

    def problem(self, steps: int) -> str | None:
        """What is inconsistent in the order of the data for a run of ``steps`` steps, in one sentence."""
        starts = [stage.start for stage in self.stages]
        if starts and (starts[0] != 1 or starts != sorted(set(starts))):
            return f"data.stages start at steps {starts}; the first starts at 1, each later one after it"
        if starts and starts[-1] > steps:
            return f"data.stages: a stage starts at step {starts[-1]}, and the run ends at run.steps {steps}"
        for number, stage in enumerate(self.stages):
            if problem := self._stage_problem(number):
                return f"data.stages: stage {number + 1}, from step {stage.start}: {problem}"
        if list(self.skip) != sorted(self.skip) or any(last < first for first, last in self.skip):
            return "data.skip needs pairs of a first and a last step, in ascending order"
        if (ends := [end for end, _ in self.batch_warmup]) != sorted(set(ends)):
            return f"data.batch_warmup ends at steps {ends}; they have to ascend"
        return None

    def _stage_problem(self, number: int) -> str | None:
        stage, weights = self.stages[number], self._weights(number)
        if strange := next((name for name in weights if name in ("", "..") or "/" in name), None):
            return f"{strange!r} is not the name of a folder in data.shards"
        if unread := next((name for name in stage.long_documents if not weights.get(name)), None):
            return f"long_documents names {unread!r}, which has no weight"
        if 0 < stage.yarn_factor < 1:
            return f"yarn_factor {stage.yarn_factor} is less than 1, which is plain RoPE"
        if stage.changes(_SIZES + _ROPE) and any(end >= stage.start for end, _ in self.batch_warmup):
            return "sequences, batch and positions cannot change before the end of data.batch_warmup"
        try:
            Stage(0, weights).shares()
        except MixtureError as error:
            return str(error)
        return None

    def _weights(self, number: int) -> Mapping[str, float]:
        """Of the stage ``number``, its own or those of an earlier one."""
        given = (stage.weights for stage in reversed(self.stages[: number + 1]) if stage.weights)
        return next(given, {ONLY: 1.0})

    @property
    def sources(self) -> list[str]:
        """The names of all sources, "." for a single corpus."""
        return sorted({cut.source for cut in self.cuts().values()})

    def cuts(self) -> dict[str, Cut]:
        """What the mixture draws from, by its names there: a source alone where it is cut as the run begins."""
        return {name: cut for stage in self._mixed() for name, (cut, _) in stage.items()}

    def _mixed(self) -> list[dict[str, tuple[Cut, float]]]:
        """Of each stage, its cuts with their weights."""
        stages = [self._cuts_of(number) for number in range(len(self.stages))]
        return stages or [{ONLY: (Cut(ONLY, self.sequence), 1.0)}]

    def _cuts_of(self, number: int) -> dict[str, tuple[Cut, float]]:
        stage = self.stages[number]
        length, found = self.shape_at(stage.start).sequence, {}
        for source, weight in self._weights(number).items():
            share = Fraction(repr(stage.long_documents.get(source, 0.0)))
            for within, part in ((False, 1 - share), (True, share)):
                if part and weight:
                    name = source if length == self.sequence and not within else f"{source}/{length}"
                    cut = Cut(source, length, within)
                    found[name + "/long" * within] = cut, float(Fraction(repr(weight)) * part)
        return found

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All that follow each other; the first begins at step 1."""
        shapes, start = [], 1
        shape = Shape(1, self.sequence, self.batch, self.micro_batch)
        for end, batch in self.batch_warmup:
            shapes.append(replace(shape, start=start, batch=batch))
            start = end + 1
        shapes.append(replace(shape, start=start))
        for stage in self.stages:
            if changed := stage.changes(_SIZES + _ROPE):
                rope = tuple({**dict(shapes[-1].rope), **stage.changes(_ROPE)}.items())
                sizes = {name: changed[name] for name in _SIZES if name in changed}
                following = replace(shapes[-1], start=stage.start, rope=rope, **sizes)
                shapes = [*(shape for shape in shapes if shape.start < stage.start), following]
        return tuple(shapes)

    @property
    def lengthens(self) -> bool:
        """Whether stages change more than the mixture."""
        return any(stage.changes(_SIZES + _ROPE) for stage in self.stages)

    def shape_at(self, step: int) -> Shape:
        """That of ``step``, counted from 1."""
        return next(shape for shape in reversed(self.shapes) if shape.start <= step)

    def position(self, step: int) -> int:
        """Number of samples trained on before ``step``."""
        return sum(
            shape.batch * (min(step, end) - shape.start) for shape, end in self._spans() if shape.start < step
        )  # fmt: skip

    def tokens(self, samples: int) -> int:
        """Number of tokens in the first ``samples``."""
        begins = [self.position(shape.start) for shape in self.shapes]
        spans = zip(self.shapes, pairwise([*begins, _ENDLESS]), strict=True)
        return sum(shape.sequence * (min(samples, end) - begin) for shape, (begin, end) in spans if begin < samples)

    def flops(self, steps: int, per_token: Callable[[int], float]) -> float:
        """What ``steps`` steps compute, where a token costs ``per_token`` of the length of its sequence."""
        return sum(
            shape.batch * (min(steps + 1, end) - shape.start) * shape.sequence * per_token(shape.sequence)
            for shape, end in self._spans()
            if shape.start <= steps
        )

    def _spans(self) -> Iterator[tuple[Shape, int]]:
        """The shapes, each with the first step of the next."""
        shapes = self.shapes
        return zip(shapes, [*(shape.start for shape in shapes[1:]), _ENDLESS], strict=True)

    def mix(self, sizes: Mapping[str, int], seed: int) -> Mixture:
        """The order of the samples over ``sizes``, the number of sequences of each of ``cuts()``."""
        from opsd.trainer.data.mixture import Mixture  # needs numpy

        skips = [(self.position(first), self.position(last + 1) - self.position(first)) for first, last in self.skip]
        return Mixture(list(self._order(skips)), sizes, seed, skips)

    def _order(self, skips: list[tuple[int, int]]) -> Iterator[Stage]:
        """The stages in samples, skipped ones included.

        What is skipped before the end of a stage makes it longer. Each such part is a stage of its own, so that the
        order of what was trained on before the pair was added does not change.
        """
        weights = [{name: weight for name, (_, weight) in stage.items()} for stage in self._mixed()]
        begins = [self.position(stage.start) for stage in self.stages] or [0]
        skipped = 0
        for number, (begin, before) in enumerate(zip(begins, [0, *begins], strict=False)):
            for length in (length for at, length in skips if before <= at < begin):
                yield Stage(begin + skipped, weights[number - 1])
                skipped += length
            yield Stage(begin + skipped, weights[number])
