"""How many parameters a model has and what a token of it computes, from its shape alone. Torch-free and pure."""

from __future__ import annotations

from opsd.trainer.model_settings import ModelSettings


def parameters(model: ModelSettings) -> int:
    """Number of parameters of the decoder."""
    layers = model.layers * layer_parameters(model) + experts_parameters(model) + dense_parameters(model)
    return layers + model.width + embedding_parameters(model)


def active_parameters(model: ModelSettings) -> int:
    """Those that a token meets: of experts the ones that it is sent to."""
    return parameters(model) - model.idle_parameters


def embedding_parameters(model: ModelSettings) -> int:
    """Of the embedding and of the output projection, which may be one matrix."""
    return model.vocab * model.width * (1 if model.tied else 2)


def layer_parameters(model: ModelSettings) -> int:
    """Of a layer without its feed-forward matrices: attention, biases and norms."""
    queries, keys = model.attention_width, model.kv_heads * model.head_channels
    attention = _latent_attention(model) if model.kv_rank else model.width * 2 * (queries + keys)
    projected = model.query_rank + model.kv_rank + model.rope_dim if model.kv_rank else queries + 2 * keys
    biases = model.qkv_bias * projected + model.output_bias * model.width
    biases += model.ffn_bias * (2 * model.ffn + model.width)
    norms = (4 if model.norms == "both" else 2) * model.width
    if model.qk_norm:
        norms += 2 * model.head_channels if model.qk_norm_over == "head" else queries + keys
    return attention + biases + norms


def dense_parameters(model: ModelSettings) -> int:
    """Of the feed-forward matrices of all layers without experts."""
    return (model.layers - model.expert_layers) * 3 * model.width * model.ffn


def experts_parameters(model: ModelSettings) -> int:
    """Of the routers, the routed and the shared experts of all layers that have them."""
    each = 3 * model.expert_channels * model.width
    return model.expert_layers * (model.experts * model.width + (model.experts + model.shared_experts) * each)


def routed_parameters(model: ModelSettings) -> int:
    """Of the routed experts alone, which expert parallelism spreads over ranks."""
    return model.expert_layers * model.experts * 3 * model.expert_channels * model.width


def unsplit_parameters(model: ModelSettings) -> int:
    """Of the layers, those that tensor parallelism leaves whole on each rank: norms, routers, latents."""
    norms = (4 if model.norms == "both" else 2) * model.width
    norms += 2 * model.head_channels if model.qk_norm else 0
    latents = model.width * (model.query_rank + model.kv_rank + model.rope_dim) + model.query_rank + model.kv_rank
    routers = model.expert_layers * model.experts * model.width
    return model.layers * (norms + (latents if model.kv_rank else 0)) + routers


def _latent_attention(model: ModelSettings) -> int:
    """Number of parameters of multi-head latent attention, without biases; see ``opsd.trainer.latent_attention``."""
    rank, latent = model.query_rank, model.kv_rank
    queries = rank * (model.width + 1 + model.attention_width) if rank else model.width * model.attention_width
    expanded = model.heads * (model.head_channels - model.rope_dim + model.value_channels)
    keys = model.width * (latent + model.rope_dim) + latent * (1 + expanded)
    return queries + keys + model.value_width * model.width


def flops_per_token(model: ModelSettings, sequence: int) -> float:
    """Forward and backward FLOP per token of sequences of ``sequence`` tokens: the numerator of MFU.

    6 N + 12 layers width sequence (PaLM, arXiv 2204.02311, appendix B), where N are the active parameters and the width
    is that of all heads of attention, the mean of queries and values. As there, attention counts the whole sequence
    although half of it is masked; a layer with a window counts its window.
    """
    return 6.0 * active_parameters(model) + attention_flops(model, sequence)


def attention_flops(model: ModelSettings, sequence: int) -> float:
    """Its second term: scores and weighted values of all layers, not halved by the causal mask."""
    seen = sum(min(sequence, model.window) if "window" in kind else sequence for kind in model.kinds)
    return 6.0 * (model.attention_width + model.value_width) * seen
