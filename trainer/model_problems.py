"""What is inconsistent in the section [model] of a run's settings."""

from __future__ import annotations

from opsd.trainer.model_settings import OF_LATENTS, STATE_PRODUCTS, ModelSettings


def model_problem(model: ModelSettings) -> str | None:
    """What is inconsistent in the settings, in one sentence."""
    if not model.head_dim and model.width % model.heads:
        return f"model.width {model.width} does not split into {model.heads} heads; set model.head_dim"
    if model.rotary_channels % 2:
        name = "rope_dim" if model.rope_dim else "head_dim"
        return f"model.{name} {model.rotary_channels} is not even, which rotary positions need"
    if model.heads % model.kv_heads:
        return f"model.heads {model.heads} is not a multiple of model.kv_heads {model.kv_heads}"
    if model.attention == "varlen" and model.dtype == "float32":
        return "model.attention varlen needs model.dtype bfloat16"
    if model.attention == "varlen" and model.attention_softcap:
        return "model.attention varlen has no model.attention_softcap; set it to auto"
    if not model.window and (kind := next((kind for kind in model.pattern if "window" in kind), None)):
        return f"model.pattern has {kind!r}, which needs model.window"
    if ("chunk" in model.pattern) != bool(model.chunk):
        return "model.chunk and layers of the kind 'chunk' in model.pattern need each other"
    if ("dual_chunk" in model.pattern) != bool(model.dual_chunk):
        return "model.dual_chunk and layers of the kind 'dual_chunk' in model.pattern need each other"
    for name in ("dual_chunk_local", "dual_chunk_positions"):
        if getattr(model, name) and not model.dual_chunk:
            return f"model.{name} needs model.dual_chunk"
    if model.dual_chunk and model.dual_chunk_local >= model.dual_chunk:
        return f"model.dual_chunk_local {model.dual_chunk_local} is not below model.dual_chunk {model.dual_chunk}"
    return _latent_problem(model) or _state_problem(model) or _expert_problem(model) or _rope_problem(model)


def _latent_problem(model: ModelSettings) -> str | None:
    if not model.kv_rank:
        given = next((name for name in sorted(OF_LATENTS) if getattr(model, name)), None)
        if given is None and model.rope_dim > model.head_channels:
            return f"model.rope_dim {model.rope_dim} is more than model.head_dim {model.head_channels}"
        return f"model.{given} needs model.kv_rank" if given else None
    if not 0 < model.rope_dim < model.head_channels:
        return f"model.kv_rank needs model.rope_dim above 0 and below model.head_dim {model.head_channels}"
    if model.value_channels > model.head_channels:
        return f"model.value_dim {model.value_dim} is more than model.head_dim {model.head_channels}"
    if model.kv_heads != model.heads:
        return f"model.kv_rank needs as many model.kv_heads as model.heads {model.heads}"
    for name in ("qk_norm", "attention_gate"):
        if getattr(model, name):
            return f"model.{name} does not work with model.kv_rank"
    return None


def _state_problem(model: ModelSettings) -> str | None:
    if not model.has_states:
        return None
    kind = next(kind for kind in model.kinds if kind in STATE_PRODUCTS)
    for name in ("state_heads", "state_key_dim", "state_value_dim"):
        if not getattr(model, name):
            return f"model.pattern has {kind!r}, which needs model.{name}"
    if model.state_heads % (model.state_key_heads or 1):
        return (
            f"model.state_heads {model.state_heads} is not a multiple of model.state_key_heads {model.state_key_heads}"
        )
    return None


def _expert_problem(model: ModelSettings) -> str | None:
    if not model.expert_layers:
        return None
    if not 0 < model.experts_per_token <= model.experts:
        return f"model.experts {model.experts} needs model.experts_per_token from 1 to {model.experts}"
    each, rest = divmod(model.experts, model.router_groups)
    if rest:
        return f"model.router_groups {model.router_groups} does not divide model.experts {model.experts}"
    if model.groups_per_token > model.router_groups:
        return f"model.groups_per_token {model.groups_per_token} is more than model.router_groups"
    if model.groups_per_token * each < model.experts_per_token:
        return f"model.groups_per_token {model.groups_per_token} has fewer experts than model.experts_per_token"
    if model.router_groups > 1 and model.router == "sigmoid" and each < 2:
        return "model.router sigmoid needs two experts in each of model.router_groups"
    return "model.ffn_bias does not work with model.experts" if model.ffn_bias else None


def _rope_problem(model: ModelSettings) -> str | None:
    if model.yarn_factor > 1 and not model.yarn_positions:
        return "model.yarn_factor needs model.yarn_positions, the length that the model was trained with before"
    if model.llama3_factor > 1 and not model.llama3_positions:
        return "model.llama3_factor needs model.llama3_positions, the length that the model was trained with before"
    scalings = ("rope_factor", "yarn_factor", "llama3_factor")
    if len(given := [f"model.{name}" for name in scalings if getattr(model, name) > 1]) > 1:
        return f"{' and '.join(given)} exclude each other"
    for name in ("yarn_turns", "llama3_turns"):
        low, high = getattr(model, name)
        if not 0 < low < high:
            return f"model.{name} needs two numbers above 0, the smaller one first"
    return None
