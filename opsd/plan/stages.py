"""How a pipeline divides a model: the layers of each rank, and how much the slowest has to do. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain

from opsd.plan.layout import Layout
from opsd.trainer import counts
from opsd.trainer.config import Config
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.settings import ParallelSettings
from opsd.trainer.stages import stage_ranges


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
