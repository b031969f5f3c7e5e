"""Hugging Face's architectures that this trainer computes: the fields of their files, the names of weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from opsd.trainer.config import ConfigError
from opsd.trainer.hf import blocks, kinds
from opsd.trainer.hf.blocks import ROUTER_BIAS, ExpertFields
from opsd.trainer.hf.kinds import Fields, Place, packed
from opsd.trainer.model_settings import STATE_PRODUCTS, LayerKind, ModelSettings

_NO_LIMIT: Final = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])


@dataclass(frozen=True, slots=True)
class StateFields:
    """How an architecture stores layers of ``kind``: its ``fields`` by our setting, and the places of its weights.

    The weights are in ``block`` of their layer.
    """

    kind: LayerKind
    fields: Mapping[str, str]
    block: str
    parts: Callable[[ModelSettings], Mapping[str, Place]]

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings for ``config``. Raises ConfigError for what this trainer does not compute."""
        if config["hidden_act"] not in ("silu", "swish"):
            raise ConfigError(
                f"config.json has hidden_act {config['hidden_act']!r}, which transformers also applies to the "
                "convolutions of layers with a state; this trainer computes silu there"
            )
        found = {ours: config[theirs] for ours, theirs in self.fields.items()}
        if self.kind == "mamba":
            if found["state_heads"] * found["state_value_dim"] != config["mamba_expand"] * config["hidden_size"]:
                raise ConfigError("config.json has mamba_n_heads x mamba_d_head unlike mamba_expand x hidden_size")
            if (limit := config.get("time_step_limit")) not in _NO_LIMIT:
                raise ConfigError(f"config.json has time_step_limit = {limit}, which this trainer does not compute")
        return found

    def fit(self, model: ModelSettings) -> bool:
        """Whether the layers of ``model`` with a state can be stored so."""
        kinds = {kind for kind in model.kinds if kind in STATE_PRODUCTS}
        return (
            kinds == {self.kind}
            and model.activation == "silu"
            and not (self.kind == "mamba" and model.state_value_width % model.width)
        )

    def config(self, model: ModelSettings) -> dict[str, Any]:
        values = model.model_dump() | {"state_key_heads": model.state_key_heads or model.state_heads}
        config = {theirs: values[ours] for ours, theirs in self.fields.items()}
        if self.kind == "mamba":
            config["mamba_expand"] = model.state_value_width // model.width
        return config

    def place(self, name: str, model: ModelSettings) -> Place:
        """The place of our parameter ``name`` within the layer."""
        part, _, end = name.rpartition(".")
        place = self.parts(model).get(part if part and end in ("weight", "bias") else name, Place(""))
        plain = {"output.weight": "out_proj.weight", "log_rate": "A_log", "step_bias": "dt_bias", "skip": "D"}
        where = f"{place.name}.{end}" if place.name else plain.get(name, name)
        return Place(f"{self.block}.{where}", place.groups, place.begin, place.end, place.of, place.channels)


def _mamba_parts(model: ModelSettings) -> dict[str, Place]:
    keys, values = model.state_key_width, model.state_value_width
    order = [("value", values), ("key", keys), ("query", keys)]
    convolved = [(f"{name}_conv", rows) for name, rows in order]
    projected = [("gate", values), *order, ("step", model.state_heads)]
    return packed("in_proj", projected) | packed("conv1d", convolved, channels=True)


def _delta_parts(model: ModelSettings) -> dict[str, Place]:
    shared, heads = model.state_shared_by, model.state_heads // model.state_shared_by
    values = shared * model.state_value_dim
    keys = [("query", model.state_key_dim), ("key", model.state_key_dim)]
    order = [*keys, ("value", values)]
    convolved = [(f"{name}_conv", rows * heads) for name, rows in order]
    return {
        **packed("in_proj_qkvz", [*order, ("gate", values)], heads),
        **packed("in_proj_ba", [("write", shared), ("step", shared)], heads),
        **packed("conv1d", convolved, channels=True),
    }


MAMBA: Final = StateFields(
    "mamba",
    {
        "state_heads": "mamba_n_heads", "state_key_heads": "mamba_n_groups", "state_key_dim": "mamba_d_state",
        "state_value_dim": "mamba_d_head", "state_conv": "mamba_d_conv", "state_conv_bias": "mamba_conv_bias",
    },
    "mamba", _mamba_parts,
)  # fmt: skip
DELTA: Final = StateFields(
    "delta",
    {
        "state_heads": "linear_num_value_heads", "state_key_heads": "linear_num_key_heads",
        "state_key_dim": "linear_key_head_dim", "state_value_dim": "linear_value_head_dim",
        "state_conv": "linear_conv_kernel_dim",
    },
    "linear_attn", _delta_parts,
)  # fmt: skip


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
    those that have experts, ``latent`` says that keys and values are computed from a latent, ``states`` is for those
    with states in some layers. ``partial`` is the share of a head's channels that have positions, where the file
    decides it, ``partial_in_rope`` that it does so in ``rope_parameters`` only. ``gated`` says that queries are stored
    with a gate. ``names`` are those of weights that are unusual.
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
    states: StateFields | None = None
    partial: float = 0.0
    partial_in_rope: bool = False
    gated: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def known(self) -> frozenset[str]:
        """The fields that are translated."""
        experts = self.experts.known if self.experts else frozenset[str]()
        latents = blocks.LATENT_FIELDS if self.latent else frozenset[str]()
        states = frozenset(self.states.fields.values()) if self.states else frozenset[str]()
        states |= {"partial_rotary_factor"} if self.partial else set()
        return experts | latents | states | {*SHAPE.values(), *ROPE, *self.flags, *self.extra, self.activation}

    def places(self, name: str, shape: Sequence[int], model: ModelSettings) -> list[Place]:
        """The stored name of our parameter ``name``, of which each expert has a part."""
        there = self.place(name, model)
        return [Place(there.name.format(number)) for number in range(shape[0])] if "{}" in there.name else [there]

    def place(self, name: str, model: ModelSettings) -> Place:
        """The stored name of our parameter ``name``, with ``{}`` for the number of an expert."""
        match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)", name)
        assert match
        layer, part = match.groups()
        if layer is None:
            part, _, end = part.rpartition(".")
            return Place(f"{self.names.get(part, _ENDS[part])}.{end}")
        place = self._in_layer(part, model.kinds[int(layer)], model)
        return replace(place, name=f"model.layers.{layer}.{place.name}")

    def _in_layer(self, name: str, kind: LayerKind, model: ModelSettings) -> Place:
        if self.states and kind in STATE_PRODUCTS and name.startswith("attention."):
            return self.states.place(name.removeprefix("attention."), model)
        if self.experts and name == ROUTER_BIAS:
            return Place(self.experts.bias)
        part, _, end = name.rpartition(".")
        if self.gated and part in ("attention.query", "attention.gate"):
            channels = [("attention.query", model.head_channels), ("attention.gate", model.head_channels)]
            return packed(f"{_BLOCK['attention.query']}.{end}", channels, model.heads)[part]
        parts = _BLOCK | _NORMS[self.fixed.get("norms", "before")] | (self.experts.names() if self.experts else {})
        parts |= {**(blocks.LATENT_NAMES if self.latent else {}), **self.names}
        return Place(f"{parts[part]}.{end}")

    def offset(self, name: str) -> float:
        """What has to be added to the stored values of our parameter ``name``."""
        part = name.rpartition(".")[0]
        of_state = part.endswith(".attention.norm")
        return 1.0 if self.one_plus and not of_state and "norm" in part.rpartition(".")[2] else 0.0


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
_QWEN3_NEXT: Final = replace(_QWEN3_MOE, shared="shared_expert", shared_width="shared_expert_intermediate_size")
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
    Architecture("llama", "Llama", _LLAMA_LIKE, {}, kinds.all_global, flags={**_BIASED, "mlp_bias": ("ffn_bias",)}),
    Architecture(
        "smollm3", "SmolLM3",
        _LLAMA_LIKE | {
            "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4,
            "use_sliding_window": False, "sliding_window": None,
        },
        {}, kinds.smollm3, _WINDOW | {"use_sliding_window", "no_rope_layers"},
        flags={**_BIASED, "mlp_bias": ("ffn_bias",)},
    ),
    Architecture(
        "qwen3", "Qwen3", _LLAMA_LIKE | _SLIDING | {"num_key_value_heads": 32, "head_dim": 128}, {"qk_norm": True},
        kinds.qwen, _WINDOW | {"use_sliding_window", "max_window_layers", blocks.CHUNKS}, flags=_BIASED,
    ),
    Architecture(
        "qwen2", "Qwen2", _LLAMA_LIKE | _SLIDING | {"num_key_value_heads": 32}, {"qkv_bias": True},
        kinds.qwen, _WINDOW | {"use_sliding_window", "max_window_layers", blocks.CHUNKS},
    ),
    Architecture(
        "mistral", "Mistral", _LLAMA_LIKE | {"num_key_value_heads": 8, "sliding_window": 4096}, {}, kinds.mistral,
        _WINDOW,
    ),
    Architecture(
        "olmo2", "Olmo2", _LLAMA_LIKE | {"rms_norm_eps": 1e-5},
        {"norms": "after", "qk_norm": True, "qk_norm_over": "all"}, kinds.all_global, flags=_BIASED,
    ),
    Architecture(
        "olmo3", "Olmo3",
        _LLAMA_LIKE | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "rope_local_base_freq": None},
        {"norms": "after", "qk_norm": True, "qk_norm_over": "all"}, kinds.olmo3, _WINDOW, flags=_BIASED,
    ),
    Architecture(
        "olmoe", "Olmoe",
        _LLAMA_LIKE | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        {"qk_norm": True, "qk_norm_over": "all"}, kinds.all_global, flags=_BIASED, experts=_OLMOE,
    ),
    Architecture(
        "mixtral", "Mixtral",
        _LLAMA_LIKE | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        {"router_normalised": True}, kinds.mistral, _WINDOW, experts=_MIXTRAL,
    ),
    Architecture(
        "qwen3_moe", "Qwen3Moe",
        _LLAMA_LIKE | {
            "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": False, "moe_intermediate_size": 768,
        },
        {"qk_norm": True}, kinds.all_global_or_window, _WINDOW | {"use_sliding_window", blocks.CHUNKS}, _BIASED,
        experts=_QWEN3_MOE,
    ),
    Architecture(
        "deepseek_v2", "DeepseekV2",
        _LATENTS | {
            "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2, "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": None, "topk_group": None,
        },
        {}, kinds.all_global, flags=_BIASED, experts=_DEEPSEEK_V2, latent=True,
        only={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1, "mlp_bias": False},
    ),
    Architecture(
        "deepseek_v3", "DeepseekV3",
        _LATENTS | {
            "n_routed_experts": 256, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        {"router": "sigmoid", "router_bias": True}, kinds.all_global, flags=_BIASED, experts=_DEEPSEEK_V3, latent=True,
        only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True},
    ),
    Architecture(
        "bamba", "Bamba",
        _LLAMA_LIKE | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attn_layer_indices": None, "mamba_n_heads": 128,
            "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
            "mamba_conv_bias": True,
        },
        {}, kinds.bamba, frozenset({
            "attn_layer_indices", "mamba_expand", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient",
            "time_step_limit",
        }),
        {**_BIASED, "mlp_bias": ("ffn_bias",)}, only={"mamba_proj_bias": False}, states=MAMBA, partial=0.5,
        partial_in_rope=True,
        names={
            "norm": "model.final_layernorm", "ffn_norm": "pre_ff_layernorm", "ffn.gate": "feed_forward.gate_proj",
            "ffn.up": "feed_forward.up_proj", "ffn.down": "feed_forward.down_proj",
        },
    ),
    Architecture(
        "qwen3_next", "Qwen3Next",
        _LLAMA_LIKE | {
            "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_num_value_heads": 32,
            "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
        {"qk_norm": True, "attention_gate": True, "shared_gate": True}, kinds.qwen3_next,
        frozenset({"layer_types", "full_attention_interval"}), _BIASED, one_plus=True, experts=_QWEN3_NEXT,
        states=DELTA, partial=0.25, gated=True,
    ),
    Architecture(
        "gemma2", "Gemma2",
        _GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        {"norms": "both"}, kinds.gemma2, _WINDOW | _GEMMA_ONLY, _BIASED, one_plus=True, activation="hidden_activation",
    ),
    Architecture(
        "gemma3_text", "Gemma3",
        _GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {"norms": "both", "qk_norm": True}, kinds.gemma3,
        _WINDOW | _GEMMA_ONLY - {"attn_logit_softcapping"} | {"rope_local_base_freq"}, _BIASED, one_plus=True,
        activation="hidden_activation",
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
