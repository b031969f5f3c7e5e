"""The gradients of one step, from its micro-batches: sequentially, or through a pipeline of stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.distributed.fsdp import FSDPModule

from opsd.client import Reporter
from opsd.trainer.batches import Batches, shard_batch
from opsd.trainer.config import Config, ConfigError
from opsd.trainer.data_settings import Shape
from opsd.trainer.gpu_clock import GpuClock
from opsd.trainer.model import Decoder
from opsd.trainer.pipeline import Pipelined
from opsd.trainer.world import World, mesh_shape

Accumulate = Callable[[int], torch.Tensor]
"""Accumulates the gradients of that many micro-batches; returns this rank's mean loss per token.

These are its terms [2], cross-entropy in nats and z-loss; 0 on all but the last pipeline stage.
"""


def micro_batches(config: Config, ranks: int) -> dict[Shape, int]:
    """Micro-batches that each of ``ranks`` runs, by shape. Raises ConfigError if layout or batch do not fit."""
    layout = config.parallel
    mesh_shape(ranks, layout)
    each = layout.tp * layout.pp * layout.cp
    return {shape: _micro_batches(config, ranks, ranks // each, shape) for shape in config.data.shapes}


def _micro_batches(config: Config, ranks: int, shares: int, shape: Shape) -> int:
    batch, rows, stages = shape.batch, shape.micro_batch, config.parallel.pp
    count, rest = divmod(batch, shares * rows)
    if rest:
        parts = f"{shares} ranks" if shares == ranks else f"{shares} groups of {ranks // shares} ranks"
        fitting = fitting_ranks(config)
        near = [size for size in fitting if size < ranks][-2:]
        near += [size for size in fitting if size > ranks][:1]
        since = f" from step {shape.start}" if shape.start > 1 else ""
        raise ConfigError(
            f"data.batch {batch}{since} is not a multiple of {parts} x data.micro_batch {rows}; "
            + (f"start {' or '.join(map(str, near))} ranks" if near else "make data.micro_batch smaller")
        )
    if count < stages:
        raise ConfigError(
            f"data.batch {batch} gives {count} micro-batches a step, fewer than the parallel.pp "
            f"{stages} stages; make data.micro_batch smaller or data.batch larger"
        )
    if config.parallel.schedule != "1f1b" and count % (rounds := count // stages):
        raise ConfigError(
            f"data.batch {batch} gives {count} micro-batches a step, which parallel.schedule "
            f"{config.parallel.schedule} cannot divide into {rounds} rounds; make them a multiple of "
            f"parallel.pp {stages}"
        )
    return count


def fitting_ranks(config: Config) -> list[int]:
    """All numbers of ranks that divide every global batch of the run evenly in its layout, ascending.

    A run may continue with any of them: the samples and their order are the same, and only rounding differs.
    """
    layout, shapes = config.parallel, config.data.shapes
    most = min(shape.batch // shape.micro_batch for shape in shapes)
    parts = range(layout.replicas, most + 1, layout.replicas)
    counts = {count: [divmod(shape.batch, count * shape.micro_batch) for shape in shapes] for count in parts}
    return [
        count * layout.tp * layout.pp * layout.cp
        for count, shares in counts.items()
        if all(rest == 0 and micro >= layout.pp for micro, rest in shares)
        and count // layout.replicas * layout.cp % layout.ep == 0
    ]


def accumulator(
    model: Decoder, batches: Batches, config: Config, world: World, reporter: Reporter, clock: GpuClock | None = None
) -> Accumulate:
    """The accumulation of a step's gradients in this layout."""
    z_loss = config.optimizer.z_loss
    if config.parallel.pp == 1:
        return Sequential(model, batches, z_loss, world.whole, reporter, clock)
    return Pipelined(model, batches, config, world, reporter)


class Sequential:
    """One micro-batch after the other; gradients are reduced with the last.

    A model that is ``whole`` on this rank stays gathered until then.
    The ``clock`` times the forward passes.
    """

    def __init__(
        self,
        model: Decoder,
        batches: Batches,
        z_loss: float,
        whole: bool,
        reporter: Reporter,
        clock: GpuClock | None = None,
    ) -> None:
        self._model, self._batches, self._z_loss, self._reporter = model, batches, z_loss, reporter
        self._whole = whole
        self._clock = clock

    def __call__(self, count: int) -> torch.Tensor:
        model = self._model
        assert isinstance(model, FSDPModule)
        model.routing.begin(count, next(model.parameters()).device)
        losses = []
        for number in range(1, count + 1):
            batch = shard_batch(self._batches.next(), model.context)
            model.set_requires_gradient_sync(number == count)
            model.set_reshard_after_backward(number == count or not self._whole)
            with self._reporter.phase("forward"), self._clock.computing() if self._clock else nullcontext():
                terms = model(batch.tokens, batch.documents, batch.targets, self._z_loss)
            with self._reporter.phase("backward"):
                torch.autograd.backward(terms.sum() / count)
            losses.append(terms.detach() / count)
        return torch.stack(losses).sum(0)
