"""Tiny random models of Hugging Face, in memory and as folders.

Tiny random models of transformers, and the same ones in this trainer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from opsd.trainer.hf.config import settings_of
from opsd.trainer.hf.weights import CONFIG, fill
from opsd.trainer.model import Decoder

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

TINY: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 24.0,
    "beta_slow": 2.0, "attention_factor": 1.3,
}  # fmt: skip
MSCALE = {
    "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 0.7,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 8, "moe_intermediate_size": 16, "rope_parameters": MSCALE,
}  # fmt: skip
DUAL_CHUNKS = {"chunk_size": 40, "local_size": 8, "original_max_position_embeddings": 32}
WINDOWED = ["sliding_attention"] * 4
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 10, "mamba_chunk_size": 8}
DELTA: dict[str, Any] = {
    "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6,
    "linear_value_head_dim": 10, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("Llama", {"num_key_value_heads": 4}),
    "Llama 3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5}),
    "Llama, biases, heads of another size": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "Llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "Llama, YaRN": ("Llama", {"rope_parameters": YARN}),
    "Llama, YaRN, mscale": ("Llama", {"rope_parameters": MSCALE}),
    "Llama, gelu": ("Llama", {"hidden_act": "gelu"}),
    "SmolLM2": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "SmolLM3": ("SmolLM3", {}),
    "SmolLM3, another pattern": ("SmolLM3", {"no_rope_layers": [0, 1, 1, 0]}),
    "SmolLM3, windows": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 5}),
    "Qwen 2.5": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen 2, windows above": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "Qwen 3": ("Qwen3", {"head_dim": 16}),
    "Qwen 3, biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "Qwen 2.5 1M": ("Qwen2", {"dual_chunk_attention_config": DUAL_CHUNKS}),
    "Mistral": ("Mistral", {"sliding_window": 7}),
    "Mistral, no window": ("Mistral", {"sliding_window": None, "head_dim": 10}),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 3": ("Olmo3", {"sliding_window": 5}),
    "OLMo 3, YaRN above windows": (
        "Olmo3", {
            "sliding_window": 9, "num_key_value_heads": 4,
            "rope_parameters": {
                "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "OLMoE": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "OLMoE, normalised": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 1, "norm_topk_prob": True}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Mixtral, window": ("Mixtral", {"num_local_experts": 3, "sliding_window": 6, "head_dim": 12}),
    "Qwen 3 MoE": (
        "Qwen3Moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16},
    ),
    "Qwen 3 MoE, first layers dense": (
        "Qwen3Moe", {
            "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0, 1],
            "moe_intermediate_size": 12, "head_dim": 8, "attention_bias": True,
        },
    ),
    "DeepSeek-V2-Lite": (
        "DeepseekV2", LATENT | {"q_lora_rank": None, "num_experts_per_tok": 3, "first_k_dense_replace": 1},
    ),
    "DeepSeek-V2": (
        "DeepseekV2", LATENT | {
            "num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
            "routed_scaling_factor": 16.0, "n_shared_experts": 2, "attention_bias": True, "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "DeepSeek-V2, no experts": ("DeepseekV2", LATENT | {"first_k_dense_replace": 4, "v_head_dim": 12}),
    "DeepSeek-V3": (
        "DeepseekV3", LATENT | {"num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    ),
    "DeepSeek-V3, no groups": (
        "DeepseekV3", LATENT | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "Bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1], "mamba_n_groups": 2}),
    "Bamba, biases, all channels rotated": (
        "Bamba", MAMBA | {
            "attn_layer_indices": [0, 3], "mamba_conv_bias": False, "mamba_d_conv": 2, "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0},
        },
    ),
    "Qwen 3 Next": ("Qwen3Next", DELTA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}),
    "Qwen 3 Next, first layers dense": (
        "Qwen3Next", DELTA | {
            "mlp_only_layers": [0, 1], "shared_expert_intermediate_size": 24, "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention"] * 2, "norm_topk_prob": False,
            "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3,
        },
    ),
    "Qwen 3 Next, no experts": ("Qwen3Next", DELTA | {"mlp_only_layers": [0, 1, 2, 3]}),
    "Gemma 2": (
        "Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6, "attn_logit_softcapping": 2.0},
    ),
    "Gemma 3": ("Gemma3", {"head_dim": 16, "num_hidden_layers": 7, "sliding_window": 5}),
    "Gemma 3, scaled": (
        "Gemma3",
        {
            "head_dim": 8, "sliding_window": 9, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
}  # fmt: skip
"""Class in transformers and how its configuration differs from its defaults, with tiny sizes."""


def theirs(name: str, folder: Path, seed: int = 0) -> Any:
    """A random model of transformers, saved into ``folder`` by itself."""
    kind, changes = MODELS[name]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config_class(**{**TINY, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def ours(folder: Path) -> Decoder:
    """The same model in this trainer."""
    model = Decoder(settings_of(json.loads((folder / CONFIG).read_text())))
    fill(model, folder)
    return model


# A tiny model and its tokenizer as folders in the form of Hugging Face.


WORDS = ["<pad>", "<eos>", "<unk>", "one", "two", "three", "four", "five"]


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of a few words in the form of Hugging Face."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)


def make_model(folder: Path) -> None:
    """A model of two thousand parameters with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    make_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
