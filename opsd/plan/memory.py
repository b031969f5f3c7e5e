"""Memory of one GPU by part, for the included trainer, in any layout. Pure.

Weights, gradients and moments are exact where the degrees divide every matrix. Activations are what autograd keeps of
each layer with the kernels of a GPU; the tests compare them with what torch allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from opsd.plan.activations import FLOAT_BYTES, half_bytes, layer_bytes
from opsd.plan.figures import Parts
from opsd.plan.layout import Layout, Stages, in_flight, stages_of
from opsd.trainer import counts
from opsd.trainer.config import Config
from opsd.trainer.model_settings import ModelSettings

GIB: Final = 1 << 30
LOGITS_BYTES: Final = 256 << 20
"""Of the logits in float32 that exist at a time: ``PART_BYTES`` of ``opsd.trainer.loss``."""
RUNTIME_BYTES: Final = 2.0 * GIB
"""Allowance for the CUDA context and NCCL's buffers, which no allocator of torch sees; not measured here."""
FRAGMENTATION: Final = 0.05
"""Allowance, as a share of what is allocated and freed in each step; not measured here."""


@dataclass(frozen=True, slots=True)
class Memory(Parts):
    """Bytes on the GPU that needs most.

    ``gathered`` are layers while FSDP has them whole, with their gradients; ``communication`` is outside torch's
    allocator.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float
    communication: float
    fragmentation: float


def memory_of(config: Config, layout: Layout, gpus: int) -> Memory:
    """The memory that ``config`` needs in ``layout`` on ``gpus`` GPUs."""
    model, shards = config.model, layout.shards(gpus)
    local = stage_parameters(config, layout) / shards
    half = half_bytes(model)
    count = layout.micro_batches(gpus, config.data.batch)
    activations = kept_bytes(config, layout, count) + _working_bytes(config, layout)
    logits = logits_bytes(config, layout)
    gathered = _gathered_bytes(config, layout, shards, half, count)
    state = state_values(config) / counts.parameters(model) - 1
    return Memory(
        weights=local * FLOAT_BYTES,
        gradients=local * FLOAT_BYTES,
        optimizer=local * FLOAT_BYTES * state,
        gathered=gathered,
        activations=activations,
        logits=logits,
        communication=RUNTIME_BYTES,
        fragmentation=FRAGMENTATION * (gathered + activations + logits),
    )


def state_values(config: Config) -> int:
    """Numbers in a checkpoint: parameters and moments, of which AdamW has two and Muon, for matrices of layers, one."""
    count = counts.parameters(config.model)
    matrices = count - counts.embedding_parameters(config.model) if config.optimizer.kind == "muon" else 0
    return 3 * count - matrices


def stage_parameters(config: Config, layout: Layout, ep: int = 1) -> float:
    """Before FSDP, of the rank of a pipeline with most; ``ep`` ranks share the experts."""
    return max(_rank_parameters(config.model, stages_of(config, layout), layout.tp, ep))


@cache
def _rank_parameters(model: ModelSettings, stages: Stages, tp: int, ep: int) -> list[float]:
    """Of each rank. With one of them tied embeddings are one matrix, with more each end has a copy."""
    of_layers: list[float] = [
        sum(layer_parameters(model, layer, tp, ep) for layer in layers) for layers in stages.ranks
    ]
    matrix = model.vocab * model.width / tp
    of_layers[0] += matrix + model.positions * model.width / tp
    of_layers[-1] += (0 if model.tied and len(stages.ranks) == 1 else matrix) + model.width
    return of_layers


def layer_parameters(model: ModelSettings, layer: int, tp: int, ep: int = 1) -> float:
    """A rank's of one layer, before FSDP."""
    whole = counts.unsplit_parameters(model, layer)
    split: float = counts.whole_layer_parameters(model, layer) - whole
    if layer >= model.layers - model.expert_layers:
        split -= counts.routed_parameters(model) / model.expert_layers * (1 - 1 / ep)
    return whole + split / tp


@cache
def _largest_layer(model: ModelSettings, tp: int, ep: int) -> float:
    return max(layer_parameters(model, layer, tp, ep) for layer in range(model.layers))


def _gathered_bytes(config: Config, layout: Layout, shards: int, half: int, count: int) -> float:
    """What FSDP holds whole: embedding and output projection for the step, and two layers at a time.

    In a pipeline all layers of a stage stay gathered; so do those that are not sharded, which need a copy only in
    another type. With several micro-batches their gradients add up unsharded in float32 until the last.
    """
    model, stage = config.model, stage_parameters(config, layout, layout.ep)
    ends = model.vocab * model.width * (1 if model.tied or layout.pp > 1 else 2) / layout.tp
    largest = _largest_layer(model, layout.tp, layout.ep)
    kept: float = stage if layout.pp > 1 or shards == 1 else ends + 2 * largest
    if shards == 1 and half == FLOAT_BYTES:
        kept = 0
    unsharded = stage * FLOAT_BYTES if count > 1 else largest * (half + FLOAT_BYTES) + ends * half
    return kept * half + (unsharded if shards > 1 or count > 1 else 0)


def logits_bytes(config: Config, layout: Layout) -> float:
    """Of the loss: a part of the logits and its gradient in two types, and the gradient of the output projection."""
    model = config.model
    half, tokens = half_bytes(model), _tokens(config, layout)
    values = min(LOGITS_BYTES / FLOAT_BYTES, tokens * model.vocab) / layout.tp
    copies = FLOAT_BYTES + (2 * half if half < FLOAT_BYTES else FLOAT_BYTES)
    projection = model.vocab * model.width / layout.tp
    return values * copies + projection * (FLOAT_BYTES + half) + tokens * model.width * half


def kept_bytes(config: Config, layout: Layout, count: int) -> float:
    """What autograd keeps between the passes, of the micro-batches in flight, of the rank where it is most."""
    model = config.model
    ends = model.width * half_bytes(model) / layout.tp * layout.stages_per_rank
    each = _rank_bytes(model, stages_of(config, layout), layout.tp, layout.recompute)
    most = max(in_flight(layout, rank, count) * (layers + ends) for rank, layers in enumerate(each))
    return _tokens(config, layout) * most


@cache
def _rank_bytes(model: ModelSettings, stages: Stages, tp: int, recompute: str) -> list[float]:
    """Bytes per token that the layers of each rank of a pipeline keep."""
    return [sum(layer_bytes(model, layer, tp, recompute) for layer in layers) for layers in stages.ranks]


def _working_bytes(config: Config, layout: Layout) -> float:
    """Of the one layer that is being computed again."""
    return _tokens(config, layout) * _most_again(config.model, layout.tp, layout.recompute)


@cache
def _most_again(model: ModelSettings, tp: int, recompute: str) -> float:
    layers = range(model.layers)
    return max(layer_bytes(model, one, tp, "none") - layer_bytes(model, one, tp, recompute) for one in layers)


def _tokens(config: Config, layout: Layout) -> float:
    return layout.micro_batch * config.data.sequence / layout.cp
