"""Configurations of models of 2025 and 2026 as their authors published them, with tiny sizes.

Each is read and computed as transformers computes it, or refused by the field that does not fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from opsd.trainer.config import ConfigError
from opsd.trainer.hf.config import config_of, settings_of
from opsd.trainer.hf.weights import write
from opsd.trainer.tensors import Chunk, Stored
from tests.fakes.hf_models import ours, transformers

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 64,
    "intermediate_size": 48, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "use_cache": True,
    "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "moe_layer_freq": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1, "seq_aux": True, "attention_bias": False,
    "num_nextn_predict_layers": 1, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
}  # fmt: skip
YARN40 = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64, "type": "yarn",
}  # fmt: skip
MOE: dict[str, Any] = {
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 12, "norm_topk_prob": True,
    "num_experts": 6, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 16,
    "max_window_layers": 36, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "use_sliding_window": False,
}  # fmt: skip
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **LATENTS, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "rope_theta": 10000, "rope_scaling": YARN40,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3-8B": (QWEN3, ""),
    "Qwen3-4B-Instruct-2507": (QWEN3 | {"rope_theta": 5000000, "tie_word_embeddings": True}, ""),
    "Qwen3-30B-A3B-2507": (QWEN3 | MOE | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, ""),
    "Qwen3-Next-80B-A3B": (
        MOE | {
            "model_type": "qwen3_next", "full_attention_interval": 4, "head_dim": 16, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_value_head_dim": 10, "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000,
            "shared_expert_intermediate_size": 12,
        },
        "",
    ),
    "SmolLM3-3B": (
        {
            "model_type": "smollm3", "attention_bias": False, "layer_types": ["full_attention"] * 4,
            "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0],
            "pretraining_tp": 2, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
            "tie_word_embeddings": True, "use_sliding_window": False,
        },
        "",
    ),
    "Olmo-3-7B": (
        {
            "model_type": "olmo3", "attention_bias": False, "num_key_value_heads": 4, "rope_theta": 500000,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 8,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                "original_max_position_embeddings": 32, "rope_type": "yarn",
            },
        },
        "",
    ),
    "DeepSeek-V3.1, converted to bfloat16": (V3, ""),
    "DeepSeek-V3.1": (
        V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "quantization_config = ",
    ),
    "Moonlight-16B-A3B": (
        V3 | {
            "q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "aux_loss_alpha": 0.001,
            "rope_scaling": None, "rope_theta": 50000.0, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5,
            "pretraining_tp": 1,
        },
        "",
    ),
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None, "head_dim": 16,
            "cache_implementation": "hybrid", "final_logit_softcapping": None, "num_key_value_heads": 1,
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "rope_local_base_freq": 10000,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 8, "sliding_window_pattern": 6,
            "num_hidden_layers": 7, "tie_word_embeddings": True,
        },
        "",
    ),
    "Falcon3-7B": (
        {
            "model_type": "llama", "activation": "swiglu", "attention_bias": False, "head_dim": 16, "mlp_bias": False,
            "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 1000042,
        },
        "activation = 'swiglu'",
    ),
    "gemma-3-4b": (
        {
            "model_type": "gemma3", "boi_token_index": 255999, "mm_tokens_per_image": 256,
            "text_config": {"model_type": "gemma3_text"}, "vision_config": {"model_type": "siglip_vision_model"},
        },
        "model_type 'gemma3'.*none of them has boi_token_index, mm_tokens_per_image, text_config, vision_config",
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 16,
            "initial_context_length": 4096, "num_experts_per_tok": 4, "num_local_experts": 32, "sliding_window": 128,
            "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"},
        },
        "model_type 'gpt_oss'.*none of them has .*swiglu_limit",
    ),
    "GLM-4.5-Air": (
        {
            "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
            "n_routed_experts": 128, "partial_rotary_factor": 0.5, "use_qk_norm": False,
        },
        "model_type 'glm4_moe'.*none of them has use_qk_norm",
    ),
    "granite-4.0-h-small": (
        {
            "model_type": "granitemoehybrid", "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
            "logits_scaling": 16, "residual_multiplier": 0.22, "position_embedding_type": "nope",
            "shared_intermediate_size": 1536,
        },
        "none of them has attention_multiplier, embedding_multiplier, logits_scaling, position_embedding_type",
    ),
    "Seed-OSS-36B": (
        {"model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False, "residual_dropout": 0.1},
        "model_type 'seed_oss'.*none of them has attention_out_bias, residual_dropout",
    ),
    "Qwen3.5, as its text model": (
        {"model_type": "qwen3_5_text", "attn_output_gate": True, "linear_num_key_heads": 16},
        "model_type 'qwen3_5_text'.*none of them has attn_output_gate",
    ),
}  # fmt: skip
"""Fields by the name of the model, and what a refusal says; none is a model that is read."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(tmp_path: Path, name: str) -> None:
    """Read, it has the logits of transformers and is exported with them."""
    fields, refusal = PUBLISHED[name]
    fields = SIZES | fields
    if refusal:
        with pytest.raises(ConfigError, match=refusal):
            settings_of(fields)
        return
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "config.json").write_text(json.dumps(fields))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "given", trust_remote_code=False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    torch.manual_seed(0)
    for value in [*model.parameters(), *(each for key, each in model.named_buffers() if "correction_bias" in key)]:
        torch.nn.init.normal_(value, std=0.3)
    model.eval().save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(fields))
    mine = ours(tmp_path / "theirs")
    stored = [
        Stored(key, tuple(value.shape), [Chunk((0,) * value.dim(), tuple(value.shape), value.detach().clone)])
        for key, value in mine.saved()
    ]
    write(tmp_path / "ours", stored, torch.float32, *config_of(mine.settings, 256))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    tokens = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        limit = (3e-5 if "Next" in name else 1e-5) * expected.abs().max().item()
        for logits in (mine(tokens, torch.zeros(2, 40, dtype=torch.int32)), again(tokens, use_cache=False).logits):
            torch.testing.assert_close(logits, expected, rtol=0, atol=limit)
