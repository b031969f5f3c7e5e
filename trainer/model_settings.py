"""The settings of a model, and what in them does not fit together.

The section [model] of a run's settings: the shape of the decoder and the variants of its parts.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, Strict


class Section(BaseModel):
    """Frozen and strict: unknown keys, values of another type and numbers that are not finite are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


OF_LATENTS: Final = frozenset({"kv_rank", "query_rank", "value_dim"})
OF_DUAL_CHUNKS: Final = frozenset({"dual_chunk", "dual_chunk_local", "dual_chunk_positions"})
OF_EXPERTS: Final = frozenset({
    "experts", "experts_per_token", "expert_ffn", "shared_experts", "shared_gate", "dense_layers", "router",
    "router_normalised", "router_scale", "router_bias", "router_groups", "groups_per_token",
})  # fmt: skip
OF_STATES: Final = frozenset({
    "state_heads", "state_key_heads", "state_key_dim", "state_value_dim", "state_conv", "state_conv_bias",
})  # fmt: skip
LayerKind = Literal["global", "window", "chunk", "dual_chunk", "nope", "nope_window", "delta", "mamba"]
"""Whether a layer of attention has rotary positions (not ``nope``), and sees its window, its chunk or its document.

``dual_chunk`` sees its document, with other positions.
``delta`` and ``mamba`` have a state instead of attention.
"""
STATE_PRODUCTS: Final[dict[LayerKind, int]] = {"delta": 3, "mamba": 2}
"""How often a token's vectors are multiplied with the state of a head, or make up such a matrix, by kind of layer."""


class ModelSettings(Section):
    """Shape of the decoder."""

    layers: PositiveInt
    """Number of transformer layers."""
    width: PositiveInt
    """Width of the residual stream."""
    heads: PositiveInt
    """Heads of attention."""
    kv_heads: PositiveInt
    """Heads of keys and values; they divide ``heads`` (grouped-query attention)."""
    head_dim: NonNegativeInt = 0
    """Channels of a head of attention; 0 is ``width`` / ``heads``."""
    kv_rank: NonNegativeInt = 0
    """Channels of the latent that keys and values of all heads are computed from (MLA, DeepSeek-V2); 0 is no MLA."""
    query_rank: NonNegativeInt = 0
    """Channels of the latent that queries are computed from, with ``kv_rank``; 0 computes them from the input."""
    rope_dim: NonNegativeInt = 0
    """How many channels of a head have rotary positions; 0 is all. With ``kv_rank`` heads share their keys."""
    value_dim: NonNegativeInt = 0
    """Channels of a head's values, with ``kv_rank``; 0 is ``head_dim``, which is the most."""
    ffn: PositiveInt
    """Width of the feed-forward layers."""
    experts: NonNegativeInt = 0
    """Experts of a layer, to some of which its router sends each token (mixture of experts); 0 is a dense model."""
    experts_per_token: NonNegativeInt = 0
    """To how many of the ``experts`` a token is sent."""
    expert_ffn: NonNegativeInt = 0
    """Width of an expert; 0 is ``ffn``."""
    shared_experts: NonNegativeInt = 0
    """Experts of each layer that compute every token beside those."""
    shared_gate: bool = False
    """Whether their output is multiplied by a gate, a number for each token (Qwen3-Next)."""
    dense_layers: NonNegativeInt = 0
    """First layers without experts."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How a router turns its logits into the weights of experts."""
    router_normalised: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    router_scale: float = Field(1.0, gt=0)
    """Factor of these weights."""
    router_groups: PositiveInt = 1
    """Groups of experts; a token is sent to experts of ``groups_per_token`` of them (DeepSeek).

    A group counts as much as its best expert, or with the router ``sigmoid`` as its two best.
    """
    groups_per_token: PositiveInt = 1
    """See ``router_groups``."""
    router_bias: bool = False
    """Whether experts are chosen by weight plus a bias, which ``optimizer.balance_rate`` moves (DeepSeek-V3)."""
    vocab: PositiveInt
    """Size of the vocabulary; at least that of the tokenizer."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """Of the gate in the feed-forward layers."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon of RMSNorm."""
    norms: Literal["before", "after", "both"] = "before"
    """Normalise the input of a layer's halves (Llama), their output (OLMo 2), or both (Gemma)."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the drawn weights."""
    tied: bool = True
    """Whether the output projection shares the embedding."""
    embedding_scale: float = Field(1.0, gt=0)
    """Factor of the embedded tokens; sqrt(width) in Gemma."""
    positions: NonNegativeInt = 0
    """Longest sequence for which each position has a learnt vector, added to the embedded token (GPT-2); 0 is none.

    Positions count from the start of a document. Rotary positions are left out by ``pattern`` = ["nope"].
    """
    logit_softcap: NonNegativeFloat = 0.0
    """Bound c of the logits, as c tanh(x / c); 0 is none."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have a bias (Qwen 2)."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    ffn_bias: bool = False
    """Whether the feed-forward layers have biases."""
    qk_norm: bool = False
    """Whether queries and keys are normalised."""
    qk_norm_over: Literal["head", "all"] = "head"
    """What ``qk_norm`` normalises: each head (Qwen 3, Gemma 3), or all heads at once (OLMo 2)."""
    attention_gate: bool = False
    """Whether the output of attention is multiplied by the sigmoid of a projection of its input (Qwen3-Next)."""
    attention_scale: NonNegativeFloat = 0.0
    """Factor of the scores of attention; 0 is 1 / sqrt(``head_dim``)."""
    attention_softcap: NonNegativeFloat = 0.0
    """Bound c of the scores of attention, as c tanh(x / c) (Gemma 2); 0 is none."""
    document_mask: bool = True
    """Whether a token sees only its own document, not earlier ones in the sequence."""
    window: NonNegativeInt = 0
    """How many tokens, itself included, a token sees in layers with a window: without ``pattern`` those with positions.

    0 is no limit.
    """
    chunk: NonNegativeInt = 0
    """Tokens of the chunks that documents are divided into in layers of the kind ``chunk``; a token sees its own."""
    dual_chunk: NonNegativeInt = 0
    """Greatest distance of positions in layers of the kind ``dual_chunk``: the length that the model is trained for."""
    dual_chunk_local: NonNegativeInt = 0
    """How many tokens before a token have their true distance there; chunks have the rest of ``dual_chunk``."""
    dual_chunk_positions: NonNegativeInt = 0
    """Scores of a document's n-th token, n above this, are multiplied there by 0.1 ln(n / this) + 1; 0 is none."""
    nope_every: NonNegativeInt = 4
    """4 leaves every 4th layer without rotary positions, 0 none."""
    pattern: Annotated[tuple[LayerKind, ...], Strict(False)] = ()
    """Kinds of the first layers, repeated for the others, instead of ``nope_every``.

    ``global``, ``window``, ``chunk`` (Llama 4) and ``dual_chunk`` (Qwen2.5-1M) have rotary positions, ``nope`` and
    ``nope_window`` none. ``delta`` (gated DeltaNet) and ``mamba`` (Mamba-2) have a state instead of attention.
    """
    state_heads: NonNegativeInt = 0
    """Heads of layers with a state, ``delta`` or ``mamba``."""
    state_key_heads: NonNegativeInt = 0
    """Heads of their queries and keys, which divide ``state_heads``; 0 is as many. Mamba-2 calls them groups."""
    state_key_dim: NonNegativeInt = 0
    """Channels of a head's queries and keys there, by which it reads and writes its state (Mamba-2: the state size)."""
    state_value_dim: NonNegativeInt = 0
    """Channels of a head's values there."""
    state_conv: PositiveInt = 4
    """Tokens that the convolution of queries, keys and values sees there, their own included."""
    state_conv_bias: bool = False
    """Whether this convolution has a bias."""
    rope_theta: float = Field(50_000.0, gt=0)
    """Base of the rotary positions."""
    window_theta: NonNegativeFloat = 0.0
    """The base in layers with a window, where positions are not scaled (Gemma 3); 0 is as in the others."""
    rope_factor: float = Field(1.0, ge=1)
    """Positions are divided by this (linear scaling)."""
    yarn_factor: float = Field(1.0, ge=1)
    """Sequence length as a multiple of ``yarn_positions`` (YaRN); 1 is plain RoPE."""
    yarn_positions: NonNegativeInt = 0
    """Sequence length of the model's earlier training; needed with ``yarn_factor``."""
    yarn_turns: Annotated[tuple[float, float], Strict(False)] = (1.0, 32.0)
    """Channels with fewer turns than the first in ``yarn_positions`` are slowed, with more than the second kept."""
    yarn_whole_channels: bool = True
    """Whether the bounds between these channels are rounded to whole channels."""
    yarn_attention: NonNegativeFloat = 0.0
    """Factor of rotated queries and keys; 0 is 0.1 ln(``yarn_factor``) + 1."""
    yarn_scores: NonNegativeFloat = 0.0
    """The scores of attention are multiplied by (0.1 ``yarn_scores`` ln(``yarn_factor``) + 1)^2 (DeepSeek-V2)."""
    llama3_factor: float = Field(1.0, ge=1)
    """Llama 3.1's scaling: by how much channels with few turns are slowed; 1 is none."""
    llama3_positions: NonNegativeInt = 0
    """Sequence length of the model's earlier training; needed with ``llama3_factor``."""
    llama3_turns: Annotated[tuple[float, float], Strict(False)] = (1.0, 4.0)
    """Channels with fewer turns than the first in ``llama3_positions`` are slowed, with more than the second kept."""
    attention: Literal["auto", "sdpa", "varlen", "flex"] = "auto"
    """Kernel; auto is varlen on a GPU, flex there with context parallelism, and sdpa wherever these do not run.

    That is on the CPU, for float32, and on a GPU of a compute capability below 8.0.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters, gradients and optimiser state are float32."""

    @property
    def head_channels(self) -> int:
        """Channels of one attention head."""
        return self.head_dim or self.width // self.heads

    @property
    def attention_width(self) -> int:
        """Channels of all heads of the queries."""
        return self.heads * self.head_channels

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that have rotary positions."""
        return self.rope_dim or self.head_channels

    @property
    def value_channels(self) -> int:
        """Channels of a head's values."""
        return self.value_dim or self.head_channels

    @property
    def value_width(self) -> int:
        """Channels of the values of all heads of the queries."""
        return self.heads * self.value_channels

    @property
    def score_scale(self) -> float:
        """Factor of the scores of attention."""
        scale = self.attention_scale or self.head_channels**-0.5
        return scale * yarn_attention(self.yarn_factor, self.yarn_scores) ** 2

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return max(0, self.layers - self.dense_layers) if self.experts else 0

    @property
    def expert_channels(self) -> int:
        """Width of an expert."""
        return self.expert_ffn or self.ffn

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that a token is not sent to."""
        return self.expert_layers * (self.experts - self.experts_per_token) * 3 * self.width * self.expert_channels

    @property
    def has_states(self) -> bool:
        """Whether there are layers with a state."""
        return not set(STATE_PRODUCTS).isdisjoint(self.kinds)

    @property
    def state_shared_by(self) -> int:
        """How many heads of a layer with a state share queries and keys."""
        return self.state_heads // (self.state_key_heads or self.state_heads)

    @property
    def state_key_width(self) -> int:
        """Channels of the queries, or keys, of all heads of a layer with a state."""
        return (self.state_key_heads or self.state_heads) * self.state_key_dim

    @property
    def state_value_width(self) -> int:
        """Channels of the values of all heads of a layer with a state."""
        return self.state_heads * self.state_value_dim

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return _kinds(tuple(self.pattern), self.layers, "window" if self.window else "global", self.nope_every)

    @property
    def architecture(self) -> dict[str, Any]:
        """What the model computes, in one form for all settings that compute the same."""
        free = {"init_std", "document_mask", "attention", "dtype", "nope_every", "pattern", "head_dim"}
        form = self.model_dump(exclude=free) | {"kinds": self.kinds, "head_channels": self.head_channels}
        unused = {"window"} if not any("window" in kind for kind in self.kinds) else set()
        unused |= {"chunk"} if "chunk" not in self.kinds else set()
        unused |= OF_DUAL_CHUNKS if "dual_chunk" not in self.kinds else set()
        unused |= set() if self.qk_norm else {"qk_norm_over"}
        unused |= set() if self.expert_layers else OF_EXPERTS
        unused |= {"ffn"} if self.expert_layers == self.layers else set()
        unused |= set() if self.kv_rank else OF_LATENTS
        unused |= {"groups_per_token"} if self.router_groups == 1 else set()
        unused |= set() if self.has_states else OF_STATES
        form["state_key_heads"] = self.state_key_heads or self.state_heads
        form["value_dim"], form["rope_dim"] = self.value_channels, self.rotary_channels
        form["expert_ffn"] = self.expert_channels
        for part in ("yarn", "llama3"):
            unused |= {name for name in form if name.startswith(f"{part}_") and form[f"{part}_factor"] == 1}
        scaled = max(self.rope_factor, self.yarn_factor, self.llama3_factor) > 1
        if "window" not in self.kinds or (self.window_theta == self.rope_theta and not scaled):
            form["window_theta"] = 0.0
        form["attention_scale"] = self.attention_scale or self.head_channels**-0.5
        form["yarn_attention"] = self.yarn_attention or yarn_attention(self.yarn_factor)
        return {name: value for name, value in form.items() if name not in unused}


def yarn_attention(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor of queries and keys for sequences longer by ``factor`` (arXiv 2309.00071, eq. 22).

    ``weight`` is what DeepSeek calls mscale.
    """
    return 0.1 * weight * math.log(factor) + 1.0


@cache
def _kinds(pattern: tuple[LayerKind, ...], layers: int, rotary: LayerKind, nope_every: int) -> tuple[LayerKind, ...]:
    if pattern:
        return tuple(pattern[layer % len(pattern)] for layer in range(layers))
    return tuple("nope" if nope_every and not (layer + 1) % nope_every else rotary for layer in range(layers))


# What is inconsistent in the section [model] of a run's settings.


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
