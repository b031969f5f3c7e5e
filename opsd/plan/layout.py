"""How a run is spread over GPUs and stages, all the ways that could be tried, and why one cannot be. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain, product
from typing import Any, Final, Literal

from opsd.trainer import counts
from opsd.trainer.config import Config
from opsd.trainer.counts import stage_ranges
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.settings import ParallelSettings, Schedule

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: Final[tuple[Recompute, ...]] = ("none", "selective", "full")
_DEGREES: Final = (1, 2, 4, 8, 16, 32, 64)
_SHARDS: Final = (8, 32, 128)
_MOST_STAGES: Final = 64
"""GPUs of a pipeline; the longest that has been published has 64 (arXiv 2104.04473)."""
_UNEVEN: Final = 1.1
"""Layers of the longest stage over the mean, up to which a number of stages is worth a look."""
_LEAST_TOKENS: Final = 2048
"""Of a sequence that context parallelism leaves on a GPU: with fewer, its products are too small."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The settings of ``[parallel]`` that a plan chooses, and ``data.micro_batch``."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    replicas: int = 1
    micro_batch: int = 1
    recompute: Recompute = "none"
    schedule: Schedule = "1f1b"
    stages_per_rank: int = 1

    @classmethod
    def of(cls, config: Config) -> Layout:
        own = config.parallel
        return cls(
            own.tp, own.pp, own.cp, own.ep, own.replicas, config.data.micro_batch, own.recompute,
            own.schedule, own.stages_per_rank,
        )  # fmt: skip

    @property
    def each(self) -> int:
        """GPUs that compute a micro-batch together."""
        return self.tp * self.pp * self.cp

    def groups(self, gpus: int) -> int:
        """How many parts the global batch is split into."""
        return gpus // self.each

    def shards(self, gpus: int) -> int:
        """Over how many GPUs FSDP spreads a parameter."""
        return gpus // (self.pp * self.replicas * self.tp)

    def micro_batches(self, gpus: int, batch: int) -> int:
        """Of a step, on each GPU."""
        return max(1, batch // (self.groups(gpus) * self.micro_batch))

    def settings(self) -> dict[str, Any]:
        """As ``[parallel]`` and ``data`` have them."""
        return {**{f"parallel.{name}": value for name, value in self.spread().items()},
                "data.micro_batch": self.micro_batch}  # fmt: skip

    def spread(self) -> dict[str, Any]:
        """All but the micro-batch."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "micro_batch"}

    def name(self, gpus: int) -> str:
        """``DP 192 x TP 2 x PP 4, interleaved 3, micro-batch 3, recompute none``: with three stages per rank."""
        parts = [f"DP {self.groups(gpus)}"]
        parts += [f"{kind.upper()} {size}" for kind in ("tp", "pp", "cp", "ep") if (size := getattr(self, kind)) > 1]
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        order = "" if self.schedule == "1f1b" else f", {self.schedule} {self.stages_per_rank}"
        return f"{' x '.join(parts)}{order}{replicas}, micro-batch {self.micro_batch}, recompute {self.recompute}"


def spreads(config: Config, gpus: int, domain: int) -> Iterator[Layout]:
    """Every degree worth a look: tensor parallelism within an NVLink domain, the others where model and GPUs divide."""
    model, sparse = config.model, config.model.expert_layers > 0
    for tp in (size for size in _DEGREES if size <= domain):
        for pp, cp in product(_pipelines(model.layers), _DEGREES):
            if gpus % (tp * pp * cp) or (cp > 1 and config.data.sequence < cp * _LEAST_TOKENS):
                continue
            dp = gpus // (tp * pp)
            for ep in (size for size in _DEGREES if size == 1 or (sparse and not model.experts % size)):
                if dp % ep:
                    continue
                yield Layout(tp, pp, cp, ep)
                for shards in _SHARDS if ep == 1 else ():
                    if shards < dp and not dp % shards and not (gpus // (tp * pp * cp)) % (dp // shards):
                        yield Layout(tp, pp, cp, ep, dp // shards)


def _pipelines(layers: int) -> list[int]:
    """Ranks of pipelines that divide the layers evenly, or nearly so."""
    return [size for size in range(1, min(_MOST_STAGES, layers) + 1) if _even(layers, size)]


def _even(layers: int, stages: int) -> bool:
    return math.ceil(layers / stages) * stages <= _UNEVEN * layers


def schedules(config: Config, spread: Layout) -> Iterator[Layout]:
    """``spread`` in each order of its micro-batches that is worth a look.

    Zero bubble is a candidate only if the file has it. It rules out compilation, and the cost of computing the
    gradients of weights separately was not measured.
    """
    layers, pp = config.model.layers, spread.pp
    if pp == 1:
        yield spread
        return
    zero = config.parallel.schedule == "zero-bubble"
    yield replace(spread, schedule="zero-bubble") if zero else spread
    for each in range(2, layers // pp + 1):
        if _even(layers, pp * each):
            yield replace(spread, schedule="zero-bubble" if zero else "interleaved", stages_per_rank=each)


def problem(config: Config, layout: Layout, gpus: int) -> str | None:
    """Why the trainer cannot run ``config`` in ``layout`` on ``gpus`` GPUs, in words; None if it can."""
    if gpus % layout.each:
        return f"{gpus} GPUs are not a multiple of {layout.each}"
    parallel = config.parallel.model_copy(update=layout.spread())
    if found := parallel.problem(config.model, config.data.sequence):
        return found
    groups = layout.groups(gpus)
    if config.data.batch % (groups * layout.micro_batch):
        return f"data.batch {config.data.batch} is not a multiple of {groups} groups x micro-batch {layout.micro_batch}"
    if (count := layout.micro_batches(gpus, config.data.batch)) < layout.pp:
        return f"{count} micro-batches a step are fewer than the {layout.pp} stages"
    if layout.schedule != "1f1b" and count % (count // layout.pp):
        return f"{count} micro-batches a step, which {layout.schedule} cannot divide into {count // layout.pp} rounds"
    return None


def micro_batches_of(config: Config, layout: Layout, gpus: int) -> Iterator[int]:
    """The micro-batches that divide a group's share of the batch, ascending; one that does not if none does."""
    share, rest = divmod(config.data.batch, layout.groups(gpus))
    if rest or not share:
        yield 1
        return
    yield from (size for size in range(1, share + 1) if not share % size and share // size >= layout.pp)
    if share < layout.pp:
        yield 1


@dataclass(frozen=True, slots=True)
class Stages:
    """Layers of each rank, and shares of the computation: of the ``slowest`` rank, and of the ``longest`` stage."""

    ranks: tuple[tuple[int, ...], ...]
    slowest: float
    longest: float


def stages_of(config: Config, layout: Layout) -> Stages:
    """As the trainer divides the layers of ``config`` in ``layout``."""
    given = config.parallel.stage_layers
    fits = len(given) == layout.pp * layout.stages_per_rank
    return _stages(config.model, layout.pp, layout.stages_per_rank, given if fits else (), config.data.sequence)


@cache
def _stages(model: ModelSettings, pp: int, each: int, given: tuple[int, ...], sequence: int) -> Stages:
    parallel = ParallelSettings(pp=pp, stages_per_rank=each, stage_layers=given)
    ranges = stage_ranges(model, parallel, sequence)
    work = [sum(counts.layer_flops(model, layer, sequence) for layer in layers) for layers in ranges]
    work[-1] += 6.0 * model.vocab * model.width
    return Stages(
        ranks=tuple(tuple(chain.from_iterable(ranges[rank::pp])) for rank in range(pp)),
        slowest=max(sum(work[rank::pp]) for rank in range(pp)) / sum(work),
        longest=max(work) / sum(work),
    )


def in_flight(layout: Layout, rank: int, count: int) -> float:
    """Micro-batches of ``count`` that a rank of the pipeline keeps the activations of.

    With 1F1B and zero bubble these are pp - rank; with v stages per rank 1/v of the steps ahead of its first backward
    pass, 2 (pp - rank - 1) + (v - 1) pp + 1 (arXiv 2104.04473, figure 4; 2205.05198, 4.2.3).
    """
    pp, each = layout.pp, layout.stages_per_rank
    ahead = pp - rank if each == 1 else (2 * (pp - rank - 1) + (each - 1) * pp + 1) / each
    return min(ahead, count)
