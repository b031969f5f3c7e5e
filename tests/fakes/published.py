"""What others have published of their runs, for the tests of `opsd plan`, and how close a plan has to come.

The tolerances were written down before any of it was computed here, those of ``RUNS`` excepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

LLAMA3: Final[dict[str, Any]] = {
    "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "num_key_value_heads": 8, "tie_word_embeddings": False, "max_position_embeddings": 8192,
}  # fmt: skip
OLMO2: Final[dict[str, Any]] = {
    "model_type": "olmo2", "vocab_size": 100352, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip


def shape(family: dict[str, Any], layers: int, width: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    """A ``config.json`` of ``family``."""
    return {
        **family, "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
        "intermediate_size": ffn, **more,
    }  # fmt: skip


CONFIGS: Final = {
    "llama-3-8b": shape(LLAMA3, 32, 4096, 32, 14336),
    "llama-3-70b": shape(LLAMA3, 80, 8192, 64, 28672),
    "llama-3-405b": shape(LLAMA3, 126, 16384, 128, 53248),
    "olmo-core-7b": shape(
        LLAMA3, 32, 4096, 32, 11008, num_key_value_heads=32, vocab_size=100352, max_position_embeddings=4096
    ),
    "olmo-2-7b": shape(OLMO2, 32, 4096, 32, 11008, num_key_value_heads=32),
    "olmo-2-13b": shape(OLMO2, 40, 5120, 40, 13824, num_key_value_heads=40),
    "deepseek-v3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000,
        "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 4096,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """Parameters, and those that a token meets, each within the share ``within``."""

    total: float
    active: float
    within: float
    source: str


SIZES: Final = {
    "llama-3-8b": Size(8_030_261_248, 8_030_261_248, 0.0, "the model card's safetensors"),
    "llama-3-70b": Size(70_553_706_496, 70_553_706_496, 0.0, "the model card's safetensors"),
    "llama-3-405b": Size(405e9, 405e9, 0.005, "arXiv 2407.21783"),
    "olmo-2-7b": Size(7.3e9, 7.3e9, 0.01, "arXiv 2501.00656"),
    "olmo-2-13b": Size(13.7e9, 13.7e9, 0.01, "arXiv 2501.00656"),
    "deepseek-v3": Size(671e9, 37e9, 0.02, "arXiv 2412.19437, without the module for multi-token prediction"),
}


@dataclass(frozen=True, slots=True)
class Time:
    """A run of ``tokens`` at ``mfu`` of the 989 TFLOP/s of an H100 or H800 took ``gpu_hours``, within ``within``."""

    config: str
    sequence: int
    tokens: float
    gpus: int
    mfu: float
    gpu_hours: float
    within: float
    source: str


TIMES: Final = (
    Time(
        "smollm3-3b", 4096, 11e12, 384, 0.30, 384 * 24 * 24, 0.05,
        "24 days on 384 H100 at about 30 % MFU (the SmolLM3 blog and training playbook)",
    ),
    Time(
        "llama-3-405b", 8192, 15.6e12, 16_384, 0.41, 30.84e6, 0.12,
        "41 % MFU on 16,384 H100 (arXiv 2407.21783, table 4); the hours of Llama 3.1's model card include all overhead",
    ),
    Time(
        "deepseek-v3", 4096, 14.8e12, 2_048, 0.4373, 2.664e6, 0.05,
        "2.664 M of the 2.788 M H800 hours were pre-training (arXiv 2412.19437, table 1); MFU, attention not halved, "
        "in Insights into DeepSeek-V3 (arXiv 2505.09343, table 4)",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens/s of a GPU in a known layout, to be predicted within ``within``; ``given`` is unlike the data sheet."""

    config: str
    gpu: str
    gpus: int
    settings: tuple[str, ...]
    tokens_per_s: float
    within: float
    source: str
    given: Mapping[str, float] = field(default_factory=dict)


def _settings(sequence: int, batch: int, micro: int, *parallel: str) -> tuple[str, ...]:
    sizes = (f"data.sequence={sequence}", f"data.batch={batch}", f"data.micro_batch={micro}", "model.dtype=bfloat16")
    return (*sizes, *(f"parallel.{setting}" for setting in parallel))


_500_W: Final = {"peak": (835e12 + 989.4e12) / 2, "bandwidth": 0.87 * 2.4e12}
"""torchtitan's H100: 500 W, HBM2e with 2.4 TB/s; "the actual peak TFLOPs number is between SXM and NVL"."""
_LLAMA_3_8B: Final = "torchtitan's benchmarks/llama3_h100_202412_torchtitan.md"

SPEEDS: Final = (
    Speed(
        "llama-3-8b", "h100", 128, _settings(8192, 256, 2, "recompute=selective"), 5605, 0.15, _LLAMA_3_8B, _500_W
    ),
    Speed(
        "llama-3-8b", "h100", 128, _settings(8192, 256, 2, "recompute=selective", "compile=true"), 6514, 0.15,
        _LLAMA_3_8B, _500_W,
    ),
    Speed(
        "smollm3-3b", "h100", 384, _settings(4096, 576, 3, "tp=2"), 13_750, 0.20,
        "13.5 to 14 thousand tokens/s on DP 192 x TP 2 (the SmolLM3 training playbook)",
    ),
    Speed(
        "olmo-core-7b", "h100", 8, _settings(4096, 1024, 2, "compile=true"), 10_000, 0.20,
        "OLMo-core 1.3's README, with its OLMo-7B.py: Llama 2's shape, on one node, nothing recomputed",
    ),
    Speed(
        "llama-3-70b", "a100", 64, _settings(8192, 64, 1, "recompute=full"), 331, 0.20,
        "torchtitan's docs/performance.md; its 2,973 of 8B is what the A100 is fitted to",
    ),
)  # fmt: skip

FITS: Final = (
    Speed(
        "llama-3-8b", "h100", 8, _settings(8192, 16, 2, "recompute=selective"), 5762, 0.01,
        f"{_LLAMA_3_8B}, not compiled", _500_W,
    ),
    Speed(
        "llama-3-8b", "h100", 8, _settings(8192, 16, 2, "recompute=selective", "compile=true"), 6667, 0.01,
        f"{_LLAMA_3_8B}, compiled", _500_W,
    ),
    Speed(
        "llama-3-8b", "a100", 64, _settings(8192, 64, 1, "recompute=selective"), 2973, 0.01,
        "torchtitan, docs/performance.md",
    ),
)  # fmt: skip
"""What ``Hardware.loop`` and ``Hardware.elementwise`` are fitted to, which proves nothing but that they are."""


def _gpt(layers: int, width: int, heads: int, vocab: int, kv_heads: int = 0) -> dict[str, Any]:
    """A decoder whose feed-forward layers have no gate, as a gated one with as many parameters: 8/3 of the width."""
    return shape(
        LLAMA3, layers, width, heads, 8 * width // 3 // 256 * 256, num_key_value_heads=kv_heads or heads,
        vocab_size=vocab,
    )  # fmt: skip


CONFIGS.update({
    "gpt-22b": _gpt(48, 6144, 64, 51200), "gpt-175b": _gpt(96, 12288, 96, 51200),
    "gpt-530b": _gpt(105, 20480, 128, 51200), "gpt-1t": _gpt(128, 25600, 160, 51200),
    "bloom-176b": _gpt(70, 14336, 112, 250880), "megascale-175b": _gpt(96, 12288, 128, 64000),
    "nemotron-4-340b": _gpt(96, 18432, 96, 256000, 8),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """The MFU of a run with another trainer, of which ``layout`` is known, to be predicted within ``within``."""

    config: str
    gpu: str
    gpus: int
    settings: tuple[str, ...]
    mfu: float
    source: str
    within: float = 0.25


def _stages(pp: int, each: int = 1) -> tuple[str, ...]:
    return ("tp=8", f"pp={pp}", *((f"stages_per_rank={each}", "schedule=interleaved") if each > 1 else ()))


_LLAMA_3: Final = "arXiv 2407.21783, table 4; with 4 stages per rank, where its own schedule had a layer in each"
_NEMOTRON: Final = "Nemotron-4 340B, arXiv 2406.11704, table 2; 8 stages per rank are assumed"
_MEGATRON: Final = "arXiv 2205.05198, tables 3 and 5, before FlashAttention; the attention is computed again"
RUNS: Final = (
    Run("llama-3-405b", "h100", 8_192, _settings(8192, 2048, 1, *_stages(16, 4)), 0.43, _LLAMA_3),
    Run("llama-3-405b", "h100", 16_384, _settings(8192, 2048, 1, *_stages(16, 4)), 0.41, _LLAMA_3),
    Run("llama-3-405b", "h100", 16_384, _settings(131_072, 128, 1, *_stages(16, 4), "cp=16"), 0.38, _LLAMA_3),
    Run("nemotron-4-340b", "h100", 1_536, _settings(4096, 768, 1, *_stages(12, 8)), 0.424, _NEMOTRON),
    Run("nemotron-4-340b", "h100", 3_072, _settings(4096, 1536, 1, *_stages(12, 8)), 0.423, _NEMOTRON),
    Run("nemotron-4-340b", "h100", 6_144, _settings(4096, 2304, 1, *_stages(12, 8)), 0.41, _NEMOTRON),
    Run("gpt-22b", "a100", 8, _settings(2048, 4, 4, "tp=8"), 0.415, _MEGATRON),
    Run("gpt-175b", "a100", 64, _settings(2048, 64, 1, *_stages(8, 3)), 0.514, _MEGATRON),
    Run("gpt-530b", "a100", 280, _settings(2048, 280, 1, *_stages(35, 3)), 0.56, _MEGATRON),
    Run("gpt-1t", "a100", 512, _settings(2048, 512, 1, *_stages(64)), 0.563, _MEGATRON),
    Run(
        "bloom-176b", "a100", 384, _settings(2048, 2048, 2, "tp=4", "pp=12", "recompute=full"), 0.75 * 150 / 312,
        "150 TFLOP/s of a GPU with recomputation (arXiv 2211.05100, 3.2.4), of which three quarters are the model's",
    ),
    Run(
        "megascale-175b", "a100", 12_288, _settings(2048, 6144, 1, *_stages(8, 6)), 0.552 / 1.34,
        "Megatron-LM beside MegaScale's 55.2 %, which is 1.34 times as much (arXiv 2402.15627)",
    ),
)  # fmt: skip
"""``within`` was chosen when the predictions were known; stacks and kernels differ, and years of them."""
