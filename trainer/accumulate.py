"""The passes of a step: micro-batches, stages of a pipeline, and the clock on the GPU.

How long the GPU computes, by CUDA events that are read once they are complete: nothing waits for the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

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
from opsd.trainer.config import Config, ConfigError
from opsd.trainer.data_settings import Shape
from opsd.trainer.model import Decoder
from opsd.trainer.regions import local_part
from opsd.trainer.world import World, mesh_shape

MOST_PENDING = 16
"""Steps whose events may be incomplete; of more the oldest are given up."""


class Event(Protocol):
    """The part of ``torch.cuda.Event`` that is used."""

    def record(self) -> None:
        """Note the time at which the GPU comes to this point of the current stream."""

    def query(self) -> bool:
        """Whether the GPU has come to it."""

    def elapsed_time(self, end_event: Any) -> Any:
        """Milliseconds to another event; both are complete."""


class GpuClock:
    """Times regions of the current stream. ``take`` ends a step and returns what is known of the newest earlier one."""

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._spare: list[Event] = []
        self._step: list[tuple[Event, Event]] = []
        self._pending: deque[list[tuple[Event, Event]]] = deque()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The region inside counts."""
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        self._step.append((begin, end))

    def take(self) -> float:
        """End the step. Returns the seconds of the newest step that the GPU has completed, 0.0 if none is new."""
        if self._step:
            self._pending.append(self._step)
            self._step = []
        seconds = 0.0
        while self._pending and (len(self._pending) > MOST_PENDING or self._pending[0][-1][1].query()):
            done = self._pending.popleft()
            if done[-1][1].query():
                seconds = float(sum(begin.elapsed_time(end) for begin, end in done)) / 1e3
            self._spare += [event for pair in done for event in pair]
        return seconds

    def _event(self) -> Event:
        return self._spare.pop() if self._spare else self._new_event()


def gpu_clock(device: torch.device) -> GpuClock | None:
    """A clock for ``device``, None if it is no CUDA device."""
    if device.type != "cuda":
        return None
    return GpuClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


# The gradients of one step through a pipeline of stages, of which a rank may have several.


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


# The gradients of one step, from its micro-batches: sequentially, or through a pipeline of stages.


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
