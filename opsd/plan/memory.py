"""Memory of one GPU by part, for the included trainer, in any layout. Pure.

Weights, gradients and moments are exact where the degrees divide every matrix. Activations are what autograd keeps of
each layer with the kernels of a GPU; the tests compare them with what torch allocates.

Bytes per token that a layer keeps for its backward pass: what autograd saves with the kernels of a GPU. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from opsd.plan.hardware import Parts
from opsd.plan.layout import Layout, Stages, in_flight, stages_of
from opsd.trainer import counts
from opsd.trainer.config import Config
from opsd.trainer.model_settings import STATE_PRODUCTS, LayerKind, ModelSettings

FLOAT_BYTES: Final = 4
"""Of a value in float32."""
CHUNK: Final = 64
"""Tokens of a chunk of a layer with a state: ``CHUNK`` of ``opsd.trainer.recurrent``."""


def half_bytes(model: ModelSettings) -> int:
    """Bytes of a value in the type of the computation."""
    return 2 if model.dtype == "bfloat16" else FLOAT_BYTES


def layer_bytes(model: ModelSettings, layer: int, tp: int, recompute: str) -> float:
    """Bytes per token that a layer keeps, spread over ``tp`` ranks.

    Between matrices the sequence is split over these ranks, their inputs are gathered (arXiv 2205.05198). ``full``
    keeps the input of the layer, ``selective`` also the products, and what was communicated.
    """
    half, stream, whole = half_bytes(model), model.width / tp, model.width
    if recompute == "full":
        return stream * half
    kind, experts = model.kinds[layer], layer >= model.layers - model.expert_layers
    if recompute == "selective":
        products = 2 * whole + (2 * stream + 2 * whole if tp > 1 else 0)
        mixer = _mixer_products(model, kind)
        values = stream + products + _ffn_values(model, experts, 2) / tp
        return values * half + mixer / tp + _routing_bytes(model, experts, again=True)
    norms = {"before": 2, "after": 2, "both": 4}[model.norms]
    values = norms * stream + 2 * whole + _ffn_values(model, experts, 4) / tp
    mixer = _mixer_bytes(model, kind)
    return values * half + mixer / tp + FLOAT_BYTES * norms / tp + _routing_bytes(model, experts, again=False)


def state_bytes(model: ModelSettings, kind: LayerKind) -> float:
    """Kept of gated DeltaNet or Mamba-2, which compute in float32 from the convolutions to the output.

    Each convolution keeps its input, its terms but one and their sum. The others are counted from the operations of
    ``opsd.trainer.recurrent`` and ``opsd.trainer.recurrent``: matrices within chunks, states between them, and
    queries and keys that heads share, copied to each of them.
    """
    half, heads, keys, values = half_bytes(model), model.state_heads, model.state_key_width, model.state_value_width
    wide = heads * model.state_key_dim
    states = values * model.state_key_dim / CHUNK
    convolved = half * (model.state_conv + 1) * (2 * keys + values)
    if kind == "delta":
        floats = 2 * values + 11 * wide + 6 * heads * CHUNK + (values + wide) + states + 9 * heads
        return convolved + half * 5 * values + FLOAT_BYTES * floats
    floats = 3 * values + 6 * wide + 3 * heads * CHUNK + 2 * states + 5 * heads
    return convolved + half * 6 * values + FLOAT_BYTES * floats


def state_products(model: ModelSettings, kind: LayerKind) -> float:
    """FLOP per token of the matrix products of such a layer in its forward pass, all of them in float32."""
    keys, values = model.state_key_dim, model.state_value_dim
    if kind == "delta":  # keys and queries with keys, the triangular system, its use; three products with the state
        return model.state_heads * (CHUNK * (4 * keys + (keys + values) + 2 * values) + 6 * keys * values)
    return model.state_heads * (2 * CHUNK * (keys + values) + 4 * keys * values)


def _mixer_bytes(model: ModelSettings, kind: LayerKind) -> float:
    if kind in STATE_PRODUCTS:
        return state_bytes(model, kind)
    return _attention_values(model) * half_bytes(model) + FLOAT_BYTES * model.heads


def _mixer_products(model: ModelSettings, kind: LayerKind) -> float:
    """What selective recomputation keeps of it."""
    if kind in STATE_PRODUCTS:
        steps = (2 if kind == "delta" else 1) * model.state_heads
        return (2 * model.state_key_width + 2 * model.state_value_width + steps) * half_bytes(model)
    return _attention_products(model) * half_bytes(model) + FLOAT_BYTES * model.heads


def _attention_values(model: ModelSettings) -> float:
    """Kept of attention: queries, keys, values and the result; of a gate its input, its sigmoid and the product.

    Of latent attention also the latents before and after their norm. Values that are smaller than the keys are padded,
    and the result is cut again.
    """
    if model.kv_rank:
        latents = 2 * model.query_rank + 2 * model.kv_rank + model.rope_dim
        smaller = model.value_channels < model.head_channels
        values = 2 * model.attention_width if smaller else _expanded(model)
        return latents + 2 * model.attention_width + values + model.value_width
    keys = model.kv_heads * model.head_channels
    normed = model.attention_width + keys if model.qk_norm else 0
    gated = 2 * model.attention_width if model.attention_gate else 0
    return 2 * model.attention_width + 2 * keys + normed + gated


def _attention_products(model: ModelSettings) -> float:
    """Its products, and the result of the kernel."""
    if not model.kv_rank:
        gates = model.attention_width if model.attention_gate else 0
        return 2 * model.attention_width + 2 * model.kv_heads * model.head_channels + gates
    down = model.query_rank + model.kv_rank + model.rope_dim
    return model.attention_width + down + _expanded(model) + model.value_width


def _expanded(model: ModelSettings) -> float:
    """Keys without positions and values of all heads, one product of the latent."""
    return model.heads * (model.head_channels - model.rope_dim + model.value_channels)


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
