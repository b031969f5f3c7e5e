"""The gradients of one step, from its micro-batches: sequentially, or through a pipeline of stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from opsd.client import Reporter
from opsd.trainer.attention import Context, positions
from opsd.trainer.config import Config, ConfigError
from opsd.trainer.data.loader import Batch
from opsd.trainer.data_settings import Shape
from opsd.trainer.gpu_clock import GpuClock
from opsd.trainer.model import Decoder
from opsd.trainer.regions import local_part
from opsd.trainer.world import World, mesh_shape

Accumulate = Callable[[int], torch.Tensor]
"""Accumulates the gradients of that many micro-batches; returns this rank's mean loss per token.

These are its terms [2], cross-entropy in nats and z-loss; 0 on all but the last pipeline stage.
"""


class Batches(Protocol):
    """A source of micro-batches."""

    def next(self) -> Batch: ...


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


def shard_batch(batch: Batch, context: Context) -> Batch:
    """This rank's part of the tokens and targets if sequences are split over ranks; documents stay whole."""
    if context is None:
        return batch
    at = positions(batch.tokens.shape[1], context, batch.tokens.device)
    return batch._replace(tokens=batch.tokens[:, at], targets=batch.targets[:, at])


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
        """See ``Accumulate``."""
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


class Pipelined:
    """Micro-batches in flight in all stages at once (1F1B, arXiv 2104.04473); all of them are read beforehand.

    A tied embedding is in the first and the last stage. Their gradients are summed, so that both copies get the same
    update.
    """

    def __init__(self, model: Decoder, batches: Batches, config: Config, world: World, reporter: Reporter) -> None:
        self._model, self._batches, self._config, self._world = model, batches, config, world
        self._reporter = reporter
        self._schedules: dict[tuple[int, int, int], Schedule1F1B | ScheduleGPipe] = {}
        self._terms: list[torch.Tensor] = []
        self._ends = world.ends if model.shared else None

    def _schedule(self, count: int, rows: int, tokens: int) -> Schedule1F1B | ScheduleGPipe:
        """A schedule of ``count`` micro-batches of ``rows`` sequences, of which this rank has so many ``tokens``.

        It has a stage of its own: a stage remembers how many there are, and of which shape.
        """
        model, config, world = self._model, self._config, self._world
        dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        ids = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
        shape = (rows, tokens // config.parallel.tp, config.model.width)
        activations = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        stage = PipelineStage(
            model, world.stage, config.parallel.pp, world.device,
            input_args=ids if model.first else activations,
            output_args=torch.empty(2, device="meta", requires_grad=True) if model.last else activations,
            group=world.mesh.get_group("pp"),
        )  # fmt: skip
        # 1F1B refuses fewer micro-batches than stages, which a replay has; for one the two are the same.
        kind = Schedule1F1B if count >= config.parallel.pp else ScheduleGPipe
        return kind(stage, count, loss_fn=partial(self._loss, count), scale_grads=False)

    def _loss(self, count: int, terms: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        self._terms.append(terms.detach() / count)
        return terms.sum() / count

    def __call__(self, count: int) -> torch.Tensor:
        """See ``Accumulate``."""
        rows = [shard_batch(self._batches.next(), self._model.context) for _ in range(count)]
        tokens, targets, documents = (
            torch.cat([getattr(batch, name) for batch in rows]) for name in ("tokens", "targets", "documents")
        )
        kind = (count, *rows[0].tokens.shape)
        if kind not in self._schedules:
            self._schedules[kind] = self._schedule(*kind)
        self._terms = [torch.zeros(2, device=self._world.device)]
        self._model.routing.begin(count, self._world.device)
        with self._reporter.phase("forward"):
            self._schedules[kind].step(
                *([tokens] if self._model.first else []),
                documents=documents, targets=targets, z_loss=self._config.optimizer.z_loss,
                target=targets if self._model.last else None, return_outputs=False,
            )  # fmt: skip
        if self._ends is not None:
            with self._reporter.phase("collective"):
                assert self._model.embedding.weight.grad is not None
                dist.all_reduce(local_part(self._model.embedding.weight.grad), group=self._ends)
        return torch.stack(self._terms).sum(0)
