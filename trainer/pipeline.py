"""The gradients of one step through a pipeline of stages, of which a rank may have several."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from opsd.client import Reporter
from opsd.trainer.batches import Batches, shard_batch
from opsd.trainer.config import Config
from opsd.trainer.model import Decoder
from opsd.trainer.regions import local_part
from opsd.trainer.world import World


class Part(nn.Module):
    """One of this rank's stages, as a module of its own; the parameters stay those of the model."""

    def __init__(self, model: Decoder, number: int) -> None:
        super().__init__()
        self._whole = (model,)  # not a submodule
        self._number = number
        layers = model.parts[number]
        self.begins, self.ends = layers.start == 0, layers.stop == model.settings.layers

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Of its layers, and of what is before the first or after the last one."""
        (model,) = self._whole
        for layer in model.parts[self._number]:
            yield from model.blocks[str(layer)].parameters(recurse)
        if self.begins:
            yield from model.embedding.parameters(recurse)
            if model.settings.positions:
                yield from model.positions.parameters(recurse)
        if self.ends:
            yield from (*model.norm.parameters(recurse), *model.head.parameters(recurse))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = self._whole[0](*args, **kwargs, part=self._number)
        return output


class Pipelined:
    """Micro-batches in flight in all stages at once, in the order of ``parallel.schedule``; all are read beforehand.

    A tied embedding is in the first and the last stage. Their gradients are summed, so that both copies get the same
    update.
    """

    def __init__(self, model: Decoder, batches: Batches, config: Config, world: World, reporter: Reporter) -> None:
        self._model, self._batches, self._config, self._world = model, batches, config, world
        self._reporter = reporter
        self._parts = [Part(model, number) for number in range(len(model.parts))]
        self._schedules: dict[tuple[int, int, int], Any] = {}
        self._terms: list[torch.Tensor] = []
        self._ends = world.ends if model.shared else None

    def _schedule(self, count: int, rows: int, tokens: int) -> Any:
        """A schedule of ``count`` micro-batches of ``rows`` sequences, of which this rank has so many ``tokens``.

        It has stages of its own: a stage remembers how many there are, and of which shape.
        """
        parallel = self._config.parallel
        stages: list[Any] = [self._stage(part, number, rows, tokens) for number, part in enumerate(self._parts)]
        settings: dict[str, Any] = {"loss_fn": partial(self._loss, count), "scale_grads": False}
        # Schedules refuse fewer micro-batches than ranks, which a replay has; for one they are the same.
        if parallel.schedule == "1f1b":
            return (Schedule1F1B if count >= parallel.pp else ScheduleGPipe)(stages[0], count, **settings)
        if count < parallel.pp:
            return ScheduleLoopedBFS(stages, count, **settings)
        interleaved = parallel.schedule == "interleaved"
        return (ScheduleInterleaved1F1B if interleaved else ScheduleInterleavedZeroBubble)(stages, count, **settings)

    def _stage(self, part: Part, number: int, rows: int, tokens: int) -> PipelineStage:
        config, world = self._config, self._world
        dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        ids = torch.empty(rows, tokens, dtype=torch.int64, device="meta")
        shape = (rows, tokens // config.parallel.tp, config.model.width)
        activations = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        return PipelineStage(
            part, world.stage + number * config.parallel.pp, config.parallel.stages, world.device,
            input_args=ids if part.begins else activations,
            output_args=torch.empty(2, device="meta", requires_grad=True) if part.ends else activations,
            group=world.mesh.get_group("pp"),
        )  # fmt: skip

    def _loss(self, count: int, terms: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        self._terms.append(terms.detach() / count)
        return terms.sum() / count

    def __call__(self, count: int) -> torch.Tensor:
        model = self._model
        assert isinstance(model, FSDPModule)
        rows = [shard_batch(self._batches.next(), model.context) for _ in range(count)]
        tokens, targets, documents = (
            torch.cat([getattr(batch, name) for batch in rows]) for name in ("tokens", "targets", "documents")
        )
        kind = (count, *rows[0].tokens.shape)
        if kind not in self._schedules:
            self._schedules[kind] = self._schedule(*kind)
        self._terms = [torch.zeros(2, device=self._world.device)]
        model.routing.begin(count, self._world.device)
        _hold_gradients(model)
        with self._reporter.phase("forward"):
            self._schedules[kind].step(
                *([tokens] if model.first else []),
                documents=documents, targets=targets, z_loss=self._config.optimizer.z_loss,
                target=targets if model.last else None, return_outputs=False,
            )  # fmt: skip
        with self._reporter.phase("collective"):
            _reduce_gradients(model)
            if self._ends is not None:
                assert model.embedding.weight.grad is not None
                dist.all_reduce(local_part(model.embedding.weight.grad), group=self._ends)
        return torch.stack(self._terms).sum(0)


def _hold_gradients(model: FSDPModule) -> None:
    """Let FSDP add up gradients without reducing them, and keep the layers gathered."""
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)


def _reduce_gradients(model: FSDPModule) -> None:
    """The work of FSDP after the last backward pass, which only the schedule knows."""
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = model._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()
