"""Sizes, FLOP and layers of a model by its settings alone, without torch.

How many parameters a model has and what a token of it computes, from its shape alone. Torch-free and pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from opsd.trainer.model_settings import STATE_PRODUCTS, LayerKind, ModelSettings
from opsd.trainer.settings import ParallelSettings


@cache
def parameters(model: ModelSettings) -> int:
    """Number of parameters of the decoder."""
    layers = sum(layer_parameters(model, kind) for kind in model.kinds)
    return layers + experts_parameters(model) + dense_parameters(model) + model.width + embedding_parameters(model)


def active_parameters(model: ModelSettings) -> int:
    """Those that a token meets: of experts the ones that it is sent to."""
    return parameters(model) - model.idle_parameters


def embedding_parameters(model: ModelSettings) -> int:
    """Of the embedding and of the output projection, which may be one matrix, and of learnt positions."""
    return (model.vocab * (1 if model.tied else 2) + model.positions) * model.width


def layer_parameters(model: ModelSettings, kind: LayerKind) -> int:
    """Of a layer without its feed-forward matrices: attention or state, biases and norms."""
    if kind in STATE_PRODUCTS:
        mixer = _state(model, kind)
    else:
        mixer = _latent_attention(model) if model.kv_rank else _attention(model)
    biases = model.ffn_bias * (2 * model.ffn + model.width)
    return mixer + biases + (4 if model.norms == "both" else 2) * model.width


def dense_parameters(model: ModelSettings) -> int:
    """Of the feed-forward matrices of all layers without experts."""
    return (model.layers - model.expert_layers) * 3 * model.width * model.ffn


def experts_parameters(model: ModelSettings) -> int:
    """Of the routers, the routed and the shared experts of all layers that have them."""
    each = 3 * model.expert_channels * model.width
    gates = model.shared_experts > 0 and model.shared_gate
    return model.expert_layers * ((model.experts + gates) * model.width + (model.experts + model.shared_experts) * each)


def routed_parameters(model: ModelSettings) -> int:
    """Of the routed experts alone, which expert parallelism spreads over ranks."""
    return model.expert_layers * model.experts * 3 * model.expert_channels * model.width


def whole_layer_parameters(model: ModelSettings, layer: int) -> int:
    """Of a layer, its feed-forward matrices or all of its experts included."""
    experts = layer >= model.layers - model.expert_layers
    ffn = experts_parameters(model) // model.expert_layers if experts else 3 * model.width * model.ffn
    return layer_parameters(model, model.kinds[layer]) + ffn


def unsplit_parameters(model: ModelSettings, layer: int) -> int:
    """Of a layer, those that tensor parallelism leaves whole on each rank: norms, latents, some biases, the router."""
    kind, heads = model.kinds[layer], model.head_channels
    whole = (4 if model.norms == "both" else 2) * model.width + model.ffn_bias * model.width
    if kind in STATE_PRODUCTS:
        whole += model.state_value_dim if kind == "delta" else 0
    else:
        whole += 2 * heads * model.qk_norm + model.output_bias * model.width
        if model.kv_rank:
            whole += (
                model.width * (model.query_rank + model.kv_rank + model.rope_dim) + model.query_rank + model.kv_rank
            )
    if layer >= model.layers - model.expert_layers:
        whole += (model.experts + (model.shared_experts > 0 and model.shared_gate)) * model.width
    return whole


def _attention(model: ModelSettings) -> int:
    """Number of parameters of a layer's attention."""
    queries, keys = model.attention_width, model.kv_heads * model.head_channels
    gates = queries if model.attention_gate else 0
    biases = model.qkv_bias * (queries + 2 * keys + gates) + model.output_bias * model.width
    norms = 2 * model.head_channels if model.qk_norm_over == "head" else queries + keys
    return model.width * (2 * (queries + keys) + gates) + biases + model.qk_norm * norms


def _latent_attention(model: ModelSettings) -> int:
    """Number of parameters of multi-head latent attention; see ``opsd.trainer.attention``."""
    rank, latent = model.query_rank, model.kv_rank
    queries = rank * (model.width + 1 + model.attention_width) if rank else model.width * model.attention_width
    expanded = model.heads * (model.head_channels - model.rope_dim + model.value_channels)
    keys = model.width * (latent + model.rope_dim) + latent * (1 + expanded)
    biases = model.qkv_bias * (rank + latent + model.rope_dim) + model.output_bias * model.width
    return queries + keys + model.value_width * model.width + biases


def _state(model: ModelSettings, kind: LayerKind) -> int:
    """Number of parameters of a layer's gated DeltaNet or Mamba-2; see ``opsd.trainer.recurrent``."""
    heads, keys, values = model.state_heads, model.state_key_width, model.state_value_width
    convolved = (2 * keys + values) * (model.state_conv + model.state_conv_bias)
    own = heads * model.width + model.state_value_dim if kind == "delta" else heads + values
    return model.width * (2 * keys + 3 * values + heads) + convolved + 2 * heads + own


def flops_per_token(model: ModelSettings, sequence: int) -> float:
    """Forward and backward FLOP per token of sequences of ``sequence`` tokens: the numerator of MFU.

    6 N + 12 layers width sequence (PaLM, arXiv 2204.02311, appendix B), where N are the active parameters and the width
    is that of all heads of attention, the mean of queries and values. As there, attention counts the whole sequence
    although half of it is masked. A layer with a window counts its window, one with chunks a chunk, one with a state
    its products.
    """
    return 6.0 * active_parameters(model) + attention_flops(model, sequence) + state_flops(model)


def layer_flops(model: ModelSettings, layer: int, sequence: int) -> float:
    """Those of ``flops_per_token`` that a token costs in one layer."""
    kind = model.kinds[layer]
    idle = model.idle_parameters // model.expert_layers if layer >= model.layers - model.expert_layers else 0
    seen = 0 if kind in STATE_PRODUCTS else tokens_seen(model, kind, sequence)
    scores = 6.0 * (model.attention_width + model.value_width) * seen
    states = 6.0 * STATE_PRODUCTS.get(kind, 0) * model.state_value_width * model.state_key_dim
    return 6.0 * (whole_layer_parameters(model, layer) - idle) + scores + states


def attention_flops(model: ModelSettings, sequence: int) -> float:
    """Scores and weighted values of all layers with attention, not halved by the causal mask."""
    attending = [kind for kind in model.kinds if kind not in STATE_PRODUCTS]
    seen = sum(tokens_seen(model, kind, sequence) for kind in attending)
    return 6.0 * (model.attention_width + model.value_width) * seen


def tokens_seen(model: ModelSettings, kind: LayerKind, sequence: int) -> int:
    """Tokens that a token sees in a layer of attention, not halved by the causal mask."""
    if kind == "chunk":
        return min(sequence, model.chunk)
    return min(sequence, model.window) if "window" in kind else sequence


def state_flops(model: ModelSettings) -> float:
    """The products with the states of all layers that have one, token by token, whatever chunks add to them."""
    products = sum(STATE_PRODUCTS.get(kind, 0) for kind in model.kinds)
    return 6.0 * products * model.state_value_width * model.state_key_dim


# How the layers of a model are divided among the stages of a pipeline. Torch-free and pure.


def stage_ranges(model: ModelSettings, parallel: ParallelSettings, sequence: int) -> list[range]:
    """The layers of each stage: as ``parallel.stage_layers`` says, or so that the slowest has least to compute.

    The work of a layer is estimated from its shape, for sequences of ``sequence`` tokens. The last stage has the
    output projection as well.
    """
    costs = [layer_flops(model, layer, sequence) for layer in range(model.layers)]
    costs[-1] += 6.0 * model.vocab * model.width
    counts = parallel.stage_layers or divide(costs, parallel.stages)
    return [range(begin, end) for begin, end in pairwise([0, *accumulate(counts)])]


def divide(costs: Sequence[float], parts: int) -> list[int]:
    """How many of the ``costs`` each of ``parts`` gets, in order and at least one.

    The largest sum is as small as possible, and of such divisions the sums are as equal as possible.
    """
    sums = [0.0, *accumulate(costs)]
    enough = (sums[-1] / parts + max(costs)) * (1 + 1e-9)  # no part of the best division is larger
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for part in range(parts):
        left = parts - part - 1
        longer = {}
        for end in range(part + 1, len(costs) - left + 1):
            divisions = []
            for begin in reversed(range(part, end)):
                if (cost := sums[end] - sums[begin]) > enough:
                    break
                if begin in best:
                    largest, squares, counts = best[begin]
                    divisions.append((max(largest, cost), squares + cost * cost, [*counts, end - begin]))
            if divisions:
                longer[end] = min(divisions)
        best = longer
    return best[len(costs)][2]
