"""Multi-head latent attention in files of Hugging Face: fields of ``config.json``, names of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from opsd.trainer.config import ConfigError
from opsd.trainer.model_settings import ModelSettings

_NOPE: Final = "qk_nope_head_dim"
_FIELDS: Final = {
    "kv_rank": "kv_lora_rank", "query_rank": "q_lora_rank", "rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim",
}  # fmt: skip
KNOWN: Final = frozenset({*_FIELDS.values(), _NOPE, "qk_head_dim"})
NAMES: Final = {
    "attention.query": "self_attn.q_proj", "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm", "attention.query_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa", "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}  # fmt: skip


def settings_of_latents(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for ``config``. Raises ConfigError for what this trainer does not compute."""
    if config["num_key_value_heads"] not in (None, config["num_attention_heads"]):
        raise ConfigError(
            f"config.json has num_key_value_heads {config['num_key_value_heads']}, which is not num_attention_heads"
        )
    if config.get("head_dim") not in (None, config["qk_rope_head_dim"]):
        raise ConfigError(
            f"config.json has head_dim {config['head_dim']}, which is not qk_rope_head_dim as in transformers"
        )
    found = {ours: config[theirs] or 0 for ours, theirs in _FIELDS.items()}
    return {**found, "head_dim": config[_NOPE] + config["qk_rope_head_dim"]}


def config_of_latents(model: ModelSettings) -> dict[str, Any]:
    """The fields for ``model``."""
    values = model.model_dump() | {"query_rank": model.query_rank or None, "value_dim": model.value_channels}
    fields = {theirs: values[ours] for ours, theirs in _FIELDS.items()}
    return {**fields, _NOPE: model.head_channels - model.rope_dim}
