"""Memory of one GPU by part, for the included trainer, in any layout. Pure.

Weights, gradients and moments are exact where the degrees divide every matrix. Activations are what autograd keeps of
each layer with the kernels of a GPU; the tests compare them with what torch allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from opsd.plan.layout import Layout
from opsd.plan.parts import Parts
from opsd.trainer import counts
from opsd.trainer.config import Config
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.settings import ParallelSettings
from opsd.trainer.stages import stage_ranges

GIB: Final = 1 << 30
FLOAT_BYTES: Final = 4
"""Of a weight, a reduced gradient or a moment of the optimizer."""
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


def stage_parameters(config: Config, layout: Layout) -> float:
    """A rank's, before FSDP, of the pipeline stage with most: an end, or one between that has more layers."""
    model = config.model
    ends = counts.embedding_parameters(model)
    layers, whole = counts.parameters(model) - ends - model.width, counts.unsplit_parameters(model)
    if layout.pp == 1:
        return (layers - whole + ends) / layout.tp + whole + model.width
    matrix, sizes = model.vocab * model.width / layout.tp, _stage_layers(model, layout.pp, config.data.sequence)
    layer = ((layers - whole) / layout.tp + whole) / model.layers
    positions = model.positions * model.width / layout.tp
    first, last = sizes[0] * layer + matrix + positions, sizes[-1] * layer + matrix + model.width
    return max(first, last, *(size * layer for size in sizes[1:-1]))


@cache
def _stage_layers(model: ModelSettings, pp: int, sequence: int) -> list[int]:
    """As the trainer divides them."""
    return [len(layers) for layers in stage_ranges(model, ParallelSettings(pp=pp), sequence)]


def _gathered_bytes(config: Config, layout: Layout, shards: int, half: int, count: int) -> float:
    """What FSDP holds whole: embedding and output projection for the step, and two layers at a time.

    In a pipeline all layers of a stage stay gathered; so do those that are not sharded, which need a copy only in
    another type. With several micro-batches their gradients add up unsharded in float32 until the last.
    """
    model, stage = config.model, stage_parameters(config, layout)
    ends = model.vocab * model.width * (1 if model.tied or layout.pp > 1 else 2) / layout.tp
    layer = (stage - ends) / (model.layers / layout.pp)
    if model.expert_layers:  # the largest, with its share of the experts
        dense = counts.routed_parameters(model) / model.expert_layers * (1 - 1 / layout.ep) / layout.tp
        layer = max(layer, layer - dense)
    kept = stage if layout.pp > 1 or shards == 1 else ends + 2 * layer
    if shards == 1 and half == FLOAT_BYTES:
        kept = 0
    unsharded = stage * FLOAT_BYTES if count > 1 else layer * (half + FLOAT_BYTES) + ends * half
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
    """What autograd keeps between the passes, of the micro-batches in flight: with 1F1B one for each stage.

    With v stages per rank these are 1 + (pp - 1) / (pp v) times as many (arXiv 2205.05198, 4.2.3).
    """
    model = config.model
    sparse = model.expert_layers
    layers = (model.layers - sparse) * layer_bytes(model, layout.tp, False, layout.recompute)
    layers += sparse * layer_bytes(model, layout.tp, True, layout.recompute) if sparse else 0
    ends = model.width * half_bytes(model) / layout.tp
    parts = config.parallel.stages_per_rank
    more = 1 + (layout.pp - 1) / (layout.pp * parts) if parts > 1 else 1
    return _tokens(config, layout) * more * min(layout.pp, count) * (layers / layout.pp + ends)


def _working_bytes(config: Config, layout: Layout) -> float:
    """Of the one layer that is being computed again."""
    tp, sparse = layout.tp, config.model.expert_layers > 0
    again = layer_bytes(config.model, tp, sparse, "none") - layer_bytes(config.model, tp, sparse, layout.recompute)
    return _tokens(config, layout) * max(again, 0.0)


def _tokens(config: Config, layout: Layout) -> float:
    return layout.micro_batch * config.data.sequence / layout.cp


def half_bytes(model: ModelSettings) -> int:
    """Bytes of a value in the type of the computation."""
    return 2 if model.dtype == "bfloat16" else FLOAT_BYTES


def layer_bytes(model: ModelSettings, tp: int, experts: bool, recompute: str) -> float:
    """Bytes per token that one layer keeps for its backward pass.

    Between matrices the sequence is split over ``tp`` ranks, their inputs are gathered (arXiv 2205.05198). ``full``
    keeps the input of the layer, ``selective`` also the products, and what was communicated.
    """
    half, stream = half_bytes(model), model.width / tp
    if recompute == "full":
        return stream * half
    whole = model.width
    norms = {"before": 2, "after": 2, "both": 4}[model.norms]
    if recompute == "selective":
        products = 2 * whole + (2 * stream + 2 * whole if tp > 1 else 0)
        values = stream + products + (_attention_products(model) + _ffn_values(model, experts, 2)) / tp
        return values * half + FLOAT_BYTES * model.heads / tp + _routing_bytes(model, experts, again=True)
    values = norms * stream + 2 * whole + (_attention_values(model) + _ffn_values(model, experts, 4)) / tp
    return values * half + FLOAT_BYTES * (norms + model.heads) / tp + _routing_bytes(model, experts, again=False)


def _attention_values(model: ModelSettings) -> float:
    """Kept of attention: queries, keys, values and the result.

    Of latent attention also the latents before and after their norm; its values are padded to the size of the keys, and
    the result is cut to size again.
    """
    if model.kv_rank:
        return 2 * model.query_rank + 2 * model.kv_rank + 4 * model.attention_width + model.value_width
    keys = model.kv_heads * model.head_channels
    normed = model.attention_width + keys if model.qk_norm else 0
    return 2 * model.attention_width + 2 * keys + normed


def _attention_products(model: ModelSettings) -> float:
    """What selective recomputation keeps of it: the products, and the result of the kernel."""
    if not model.kv_rank:
        return 2 * model.attention_width + 2 * model.kv_heads * model.head_channels
    expanded = model.heads * (model.head_channels - model.rope_dim + model.value_channels)
    down = model.query_rank + model.kv_rank + model.rope_dim
    return model.attention_width + down + expanded + model.value_width


def _ffn_values(model: ModelSettings, experts: bool, copies: int) -> float:
    """``copies`` of the gate's channels: gate, its activation, the other half, their product; or two products."""
    channels = (model.experts_per_token + model.shared_experts) * model.expert_channels if experts else model.ffn
    return copies * channels


def _routing_bytes(model: ModelSettings, experts: bool, *, again: bool) -> float:
    """Of a router, in float32, and of the tokens in the order of experts, which go there and come back."""
    if not experts:
        return 0.0
    half, rows = half_bytes(model), model.experts_per_token * model.width
    if again:
        return FLOAT_BYTES * model.experts + rows * half
    copy = model.width if half < FLOAT_BYTES else 0
    return FLOAT_BYTES * (copy + 4 * model.experts) + 2 * rows * half
