"""Bytes per token that a layer keeps for its backward pass: what autograd saves with the kernels of a GPU. Pure."""

from __future__ import annotations

from typing import Final

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
