"""Hugging Face's architectures that this trainer computes: the fields of their files, the names of weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from opsd.trainer.config import ConfigError
from opsd.trainer.hf import latent
from opsd.trainer.hf.experts import ROUTER_BIAS, ExpertFields
from opsd.trainer.model_settings import LayerKind

Fields = Mapping[str, Any]
"""Of a ``config.json``."""

SHAPE: Final = {
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size", "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}  # fmt: skip
ROPE: Final = {"rope_parameters", "rope_scaling", "rope_theta", "head_dim"}
_WINDOW: Final = frozenset({"sliding_window", "layer_types"})
_BLOCK: Final = {
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj", "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "ffn.gate": "mlp.gate_proj", "ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj",
}  # fmt: skip
_ENDS: Final = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_NORMS: Final = {
    "before": {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "after": {"attention_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm", "ffn_post_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """A ``model_type``. ``defaults`` are those of its class in transformers, for fields that a file leaves out.

    ``fixed`` are settings that it does not let the file decide. ``one_plus`` says that weights of norms are stored less
    1. ``kinds`` gives the kinds of the layers. ``flags`` are fields that are true or false, with the settings that
    they set, ``extra`` other fields that are read, and ``only`` those that must have one value. ``experts`` is for
    those that have experts, ``latent`` says that keys and values are computed from a latent.
    """

    kind: str
    name: str
    defaults: Fields
    fixed: Fields
    kinds: Callable[[Fields], list[LayerKind]]
    extra: frozenset[str] = frozenset()
    flags: Fields = field(default_factory=dict)
    one_plus: bool = False
    activation: str = "hidden_act"
    experts: ExpertFields | None = None
    latent: bool = False
    only: Fields = field(default_factory=dict)

    @property
    def known(self) -> frozenset[str]:
        """The fields that are translated."""
        experts = self.experts.known if self.experts else frozenset[str]()
        latents = latent.KNOWN if self.latent else frozenset[str]()
        return experts | latents | {*SHAPE.values(), *ROPE, *self.flags, *self.extra, self.activation}

    def weights(self, name: str, shape: Sequence[int]) -> list[str]:
        """The names there of our parameter ``name``, of which each expert has a part."""
        there = self.weight(name)
        return [there.format(number) for number in range(shape[0])] if "{}" in there else [there]

    def weight(self, name: str) -> str:
        """The name there of our parameter ``name``, with ``{}`` for the number of an expert."""
        match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(weight|bias)", name)
        assert match
        layer, part, end = match.groups()
        if layer is None:
            return f"{_ENDS[part]}.{end}"
        if self.experts and f"{part}.{end}" == ROUTER_BIAS:
            return f"model.layers.{layer}.{self.experts.bias}"
        parts = _BLOCK | _NORMS[self.fixed.get("norms", "before")] | (self.experts.names() if self.experts else {})
        parts |= latent.NAMES if self.latent else {}
        return f"model.layers.{layer}.{parts[part]}.{end}"

    def offset(self, name: str) -> float:
        """What has to be added to the stored values of our parameter ``name``."""
        return 1.0 if self.one_plus and "norm" in name.rpartition(".")[0].rpartition(".")[2] else 0.0


def _all_global(config: Fields) -> list[LayerKind]:
    return ["global"] * config["num_hidden_layers"]


def _by_type(config: Fields) -> list[LayerKind]:
    names: dict[str, LayerKind] = {"full_attention": "global", "sliding_attention": "window"}
    if strange := next((name for name in config["layer_types"] if name not in names), None):
        raise ConfigError(f"config.json has {strange!r} in layer_types; {' and '.join(names)} can be used")
    return [names[name] for name in config["layer_types"]]


def _mistral(config: Fields) -> list[LayerKind]:
    if config.get("layer_types"):
        return _by_type(config)
    return ["window" if config["sliding_window"] else "global"] * config["num_hidden_layers"]


def _all_global_or_window(config: Fields) -> list[LayerKind]:
    windows = config["use_sliding_window"] and config["sliding_window"]
    return ["window" if windows else "global"] * config["num_hidden_layers"]


def _qwen(config: Fields) -> list[LayerKind]:
    if not (config["use_sliding_window"] and config["sliding_window"]):
        return _all_global(config)
    if config.get("layer_types"):
        return _by_type(config)
    full = config["max_window_layers"]
    return ["window" if layer >= full else "global" for layer in range(config["num_hidden_layers"])]


def _gemma(config: Fields) -> list[LayerKind]:
    if config.get("layer_types"):
        return _by_type(config)
    every = config.get("sliding_window_pattern") or config["_sliding_window_pattern"]
    return ["window" if (layer + 1) % every else "global" for layer in range(config["num_hidden_layers"])]


def _smollm3(config: Fields) -> list[LayerKind]:
    layers, every = range(config["num_hidden_layers"]), config["no_rope_layer_interval"]
    rotary = config.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in layers]
    windows = bool(config["use_sliding_window"] and config["sliding_window"])
    windowed = [windows and not has for has in rotary]
    if types := config.get("layer_types"):
        windowed = [kind == "window" for kind in _by_type({"layer_types": types})]
    kinds: dict[tuple[bool, bool], LayerKind] = {
        (True, False): "global", (True, True): "window", (False, False): "nope", (False, True): "nope_window",
    }  # fmt: skip
    return [kinds[bool(has), window] for has, window in zip(rotary, windowed, strict=False)]


_LLAMA_LIKE: Final[dict[str, Any]] = {
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": False,
}  # fmt: skip
_SLIDING: Final[dict[str, Any]] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA: Final[dict[str, Any]] = _LLAMA_LIKE | {
    "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}  # fmt: skip
_OLMOE: Final = ExpertFields({
    "experts": "num_experts", "experts_per_token": "num_experts_per_tok", "router_normalised": "norm_topk_prob",
})  # fmt: skip
_QWEN3_MOE: Final = ExpertFields(
    {**_OLMOE.fields, "expert_ffn": "moe_intermediate_size"}, "num_local_experts", "mlp_only_layers"
)
_MIXTRAL: Final = ExpertFields(
    {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    block="block_sparse_moe", matrices=("w1", "w3", "w2"),
)  # fmt: skip
_DEEPSEEK: Final = {
    "experts": "n_routed_experts", "experts_per_token": "num_experts_per_tok", "expert_ffn": "moe_intermediate_size",
    "shared_experts": "n_shared_experts", "dense_layers": "first_k_dense_replace",
    "router_scale": "routed_scaling_factor", "router_groups": "n_group", "groups_per_token": "topk_group",
}  # fmt: skip
_DEEPSEEK_V2: Final = ExpertFields(_DEEPSEEK, grouping="topk_method")
_DEEPSEEK_V3: Final = ExpertFields(
    {**_DEEPSEEK, "router_normalised": "norm_topk_prob"}, "num_local_experts", bias="mlp.gate.e_score_correction_bias"
)
_LATENTS: Final[dict[str, Any]] = _LLAMA_LIKE | {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_BIASED: Final = {"attention_bias": ("qkv_bias", "output_bias")}
_GEMMA_ONLY: Final = frozenset({
    "hidden_act", "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping",
})  # fmt: skip

ARCHITECTURES: Final = (
    Architecture("llama", "Llama", _LLAMA_LIKE, {}, _all_global, flags={**_BIASED, "mlp_bias": ("ffn_bias",)}),
    Architecture(
        "smollm3", "SmolLM3",
        _LLAMA_LIKE | {
            "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4,
            "use_sliding_window": False, "sliding_window": None,
        },
        {}, _smollm3, _WINDOW | {"use_sliding_window", "no_rope_layers"},
        flags={**_BIASED, "mlp_bias": ("ffn_bias",)},
    ),
    Architecture(
        "qwen3", "Qwen3", _LLAMA_LIKE | _SLIDING | {"num_key_value_heads": 32, "head_dim": 128}, {"qk_norm": True},
        _qwen, _WINDOW | {"use_sliding_window", "max_window_layers"}, flags=_BIASED,
    ),
    Architecture(
        "qwen2", "Qwen2", _LLAMA_LIKE | _SLIDING | {"num_key_value_heads": 32}, {"qkv_bias": True},
        _qwen, _WINDOW | {"use_sliding_window", "max_window_layers"},
    ),
    Architecture(
        "mistral", "Mistral", _LLAMA_LIKE | {"num_key_value_heads": 8, "sliding_window": 4096}, {}, _mistral, _WINDOW,
    ),
    Architecture(
        "olmo2", "Olmo2", _LLAMA_LIKE | {"rms_norm_eps": 1e-5},
        {"norms": "after", "qk_norm": True, "qk_norm_over": "all"}, _all_global, flags=_BIASED,
    ),
    Architecture(
        "olmoe", "Olmoe",
        _LLAMA_LIKE | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        {"qk_norm": True, "qk_norm_over": "all"}, _all_global, flags=_BIASED, experts=_OLMOE,
    ),
    Architecture(
        "mixtral", "Mixtral",
        _LLAMA_LIKE | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        {"router_normalised": True}, _mistral, _WINDOW, experts=_MIXTRAL,
    ),
    Architecture(
        "qwen3_moe", "Qwen3Moe",
        _LLAMA_LIKE | {
            "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": False, "moe_intermediate_size": 768,
        },
        {"qk_norm": True}, _all_global_or_window, _WINDOW | {"use_sliding_window"}, _BIASED, experts=_QWEN3_MOE,
    ),
    Architecture(
        "deepseek_v2", "DeepseekV2",
        _LATENTS | {
            "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2, "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": None, "topk_group": None,
        },
        {}, _all_global, flags=_BIASED, experts=_DEEPSEEK_V2, latent=True,
        only={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1, "mlp_bias": False},
    ),
    Architecture(
        "deepseek_v3", "DeepseekV3",
        _LATENTS | {
            "n_routed_experts": 256, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        {"router": "sigmoid", "router_bias": True}, _all_global, flags=_BIASED, experts=_DEEPSEEK_V3, latent=True,
        only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True},
    ),
    Architecture(
        "gemma2", "Gemma2",
        _GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "_sliding_window_pattern": 2},
        {"norms": "both"}, _gemma, _WINDOW | _GEMMA_ONLY, _BIASED, one_plus=True, activation="hidden_activation",
    ),
    Architecture(
        "gemma3_text", "Gemma3",
        _GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "_sliding_window_pattern": 6},
        {"norms": "both", "qk_norm": True}, _gemma, _WINDOW | _GEMMA_ONLY | {"rope_local_base_freq"}, _BIASED,
        one_plus=True, activation="hidden_activation",
    ),
)  # fmt: skip
"""In the order in which they are tried for an export."""


def architecture_of(config: Fields) -> Architecture:
    """The architecture of a ``config.json``. Raises ConfigError if it is not known."""
    kind = config.get("model_type")
    if found := next((each for each in ARCHITECTURES if each.kind == kind), None):
        return found
    kinds = ", ".join(each.kind for each in ARCHITECTURES)
    raise ConfigError(f"config.json has model_type {kind!r}; these can be used: {kinds}")
