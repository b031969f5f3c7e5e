"""Parts of Hugging Face's models that need more than names: latent and dual-chunk attention, experts.

Multi-head latent attention in files of Hugging Face: fields of ``config.json``, names of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from opsd.trainer.config import ConfigError
from opsd.trainer.hf.kinds import Fields
from opsd.trainer.model_settings import LayerKind, ModelSettings

_NOPE: Final = "qk_nope_head_dim"
_LATENT: Final = {
    "kv_rank": "kv_lora_rank", "query_rank": "q_lora_rank", "rope_dim": "qk_rope_head_dim", "value_dim": "v_head_dim",
}  # fmt: skip
LATENT_FIELDS: Final = frozenset({*_LATENT.values(), _NOPE, "qk_head_dim"})
LATENT_NAMES: Final = {
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
    found = {ours: config[theirs] or 0 for ours, theirs in _LATENT.items()}
    return {**found, "head_dim": config[_NOPE] + config["qk_rope_head_dim"]}


def config_of_latents(model: ModelSettings) -> dict[str, Any]:
    """The fields for ``model``."""
    values = model.model_dump() | {"query_rank": model.query_rank or None, "value_dim": model.value_channels}
    fields = {theirs: values[ours] for ours, theirs in _LATENT.items()}
    return {**fields, _NOPE: model.head_channels - model.rope_dim}


# Dual-chunk attention in a ``config.json``: the field that Qwen's models for a million tokens have, and vLLM reads.


CHUNKS: Final = "dual_chunk_attention_config"
_OF_CHUNKS: Final = {
    "dual_chunk": ("chunk_size", 8192), "dual_chunk_local": ("local_size", 1024),
    "dual_chunk_positions": ("original_max_position_embeddings", 0),
}  # fmt: skip
"""Ours, theirs, and what vLLM takes where the file leaves it out."""


def settings_of_dual_chunks(given: Fields) -> dict[str, Any]:
    """The settings for the field's content. Raises ConfigError for what this trainer does not compute."""
    known = {theirs for theirs, _ in _OF_CHUNKS.values()}
    if strange := next((name for name, value in given.items() if value and name not in known), None):
        raise ConfigError(f"config.json has {strange} in {CHUNKS}, which this trainer does not compute")
    return {ours: given.get(theirs, default) for ours, (theirs, default) in _OF_CHUNKS.items()}


def with_dual_chunks(kinds: list[LayerKind]) -> list[LayerKind]:
    """The kinds of a model's layers if its file has the field. Raises ConfigError for layers with a window."""
    if set(kinds) != {"global"}:
        raise ConfigError(f"config.json has {CHUNKS} with windows, which vLLM does not compute; remove one of them")
    return ["dual_chunk"] * len(kinds)


def config_of_dual_chunks(model: ModelSettings) -> dict[str, Any]:
    """The field for ``model``, if all its layers are so."""
    if set(model.kinds) != {"dual_chunk"}:
        return {}
    return {CHUNKS: {theirs: getattr(model, ours) for ours, (theirs, _) in _OF_CHUNKS.items()}}


# Mixtures of experts in files of Hugging Face: fields of ``config.json``, names of weights.


TRAINING: Final = frozenset({"output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size"})
"""Fields that change nothing in what a model computes."""

_METHODS: Final = ("greedy", "group_limited_greedy")
ROUTER_BIAS: Final = "ffn.experts.bias"


@dataclass(frozen=True, slots=True)
class ExpertFields:
    """How an architecture says what experts it has.

    ``fields`` are theirs by our setting. ``count`` is another name of the number of experts, used by later releases.
    ``dense`` is the field with the numbers of the layers without experts, ``grouping`` the one that says whether groups
    of experts are chosen. ``block`` and ``matrices`` name the weights; the router is ``gate`` in the block. ``bias`` is
    the name of its bias in the layer. ``shared`` names the experts that compute every token in the block, and
    ``shared_width`` is the field with their width together.
    """

    fields: Mapping[str, str]
    count: str = ""
    dense: str = ""
    grouping: str = ""
    bias: str = ""
    block: str = "mlp"
    shared: str = "shared_experts"
    shared_width: str = ""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def known(self) -> frozenset[str]:
        """The fields that are translated or change nothing."""
        return TRAINING | {*self.fields.values(), self.count, self.dense, self.grouping, self.shared_width} - {""}

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings for ``config``. Raises ConfigError for what this trainer does not compute."""
        if (config.get(self.fields.get("dense_layers", "")) or 0) >= config["num_hidden_layers"]:
            return {}
        try:
            found = {ours: config[theirs] for ours, theirs in self.fields.items()}
        except KeyError as error:
            raise ConfigError(f"config.json lacks {error.args[0]}") from error
        if self.count in config:
            found["experts"] = config[self.count]
        if self.dense:
            layers = config.get(self.dense) or []
            if sorted(layers) != list(range(len(layers))):
                raise ConfigError(f"config.json has {self.dense} = {layers}; only first layers can be without experts")
            found["dense_layers"] = len(layers)
        if self.shared_width:
            found["shared_experts"], rest = divmod(config[self.shared_width], found["expert_ffn"])
            if rest:
                raise ConfigError(
                    f"config.json has {self.shared_width} {config[self.shared_width]}, which is not a multiple of "
                    f"{self.fields['expert_ffn']}"
                )
        if self.grouping and not self._grouped(config[self.grouping]):
            found |= {"router_groups": 1, "groups_per_token": 1}
        return found

    def _grouped(self, method: object) -> bool:
        if method not in _METHODS:
            raise ConfigError(f"config.json has {self.grouping} {method!r}; {' and '.join(_METHODS)} can be used")
        return method == _METHODS[1]

    def config(self, model: ModelSettings) -> dict[str, Any]:
        if not model.expert_layers:
            name = self.fields.get("dense_layers")
            return {name: model.layers} if name else {self.dense: list(range(model.layers))}
        values = model.model_dump() | {"expert_ffn": model.expert_channels}
        config = {theirs: values[ours] for ours, theirs in self.fields.items()}
        if self.shared_width:
            config[self.shared_width] = model.shared_experts * model.expert_channels
        if "expert_ffn" not in self.fields:
            config["intermediate_size"] = model.expert_channels
        if self.dense:
            config[self.dense] = list(range(model.dense_layers))
        if self.grouping:
            config[self.grouping] = _METHODS[model.router_groups > 1]
        return config

    def names(self) -> dict[str, str]:
        """The names of the parts of a layer by ours; ``{}`` is the number of the expert."""
        parts = dict(zip(("gate", "up", "down"), self.matrices, strict=True))
        return {
            "ffn.experts.router": f"{self.block}.gate",
            **{f"ffn.experts.networks.{ours}": f"{self.block}.experts.{{}}.{theirs}" for ours, theirs in parts.items()},
            **{f"ffn.shared.{ours}": f"{self.block}.{self.shared}.{theirs}" for ours, theirs in parts.items()},
            "ffn.shared_gate": f"{self.block}.{self.shared}_gate",
        }
