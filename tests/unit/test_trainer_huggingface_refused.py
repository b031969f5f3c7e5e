"""Models of Hugging Face that this trainer would compute otherwise are refused by the name of the field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from opsd.trainer.config import ConfigError
from opsd.trainer.hf.config import settings_of
from opsd.trainer.hf.dual_chunk import FIELD
from opsd.trainer.hf.weights import CONFIG, fill
from tests.fakes.hf_models import DUAL_CHUNKS, TINY, WINDOWED, YARN, ours, theirs, transformers


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("Llama", {FIELD: DUAL_CHUNKS}, f"{FIELD} = .* does not compute for llama"),
        ("Qwen2", {FIELD: DUAL_CHUNKS | {"sparse_attention_config": [{}]}}, f"sparse_attention_config in {FIELD}"),
        (
            "Qwen2",
            {FIELD: DUAL_CHUNKS, "use_sliding_window": True, "sliding_window": 5, "layer_types": WINDOWED},
            f"{FIELD} with windows",
        ),
    ],
)  # fmt: skip
def test_other_dual_chunks_are_refused(name: str, changes: dict[str, Any], text: str) -> None:
    """By the name of the field."""
    config = getattr(transformers, f"{name}Config")(**TINY).to_dict()
    with pytest.raises(ConfigError, match=text):
        settings_of(config | changes)


def changed(folder: Path, changes: dict[str, object]) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(folder: Path, name: str, changes: dict[str, object], text: str) -> None:
    """Weights that one has exported under ``name`` are refused with ``text`` once their configuration has changed."""
    theirs(name, folder)
    model = ours(folder)
    changed(folder, changes)
    with pytest.raises(ConfigError, match=text):
        fill(model, folder)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "lacks factor for rope_type llama3"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": YARN | {"factor": 1.0}}, "attention_factor = 1.3 with a factor of 1"),
        ({"rope_parameters": "yarn"}, "field of another type, or a number, that cannot be: 'str'"),
        ({"rope_parameters": None, "rope_theta": None}, "another type"),
        ({"rope_parameters": {"rope_theta": math.nan}}, "rope_parameters = .* which is no finite number"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps = inf, which is no finite number"),
        ({"head_dim": 1}, "model.head_dim 1 is not even"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"no_rope_layers": [0, 1, 1, 0]}, r'needs model.pattern = \["nope", "global", "global", "nope"\], not'),
        ({"intermediate_size": 50}, "needs model.ffn = 50, not 48"),
        ({"head_dim": 16}, "needs model.head_dim = 16, not 8"),
        ({"hidden_size": None}, "model.width a value that cannot be"),
        ({"attention_multiplier": 0.5}, "attention_multiplier = 0.5, which this trainer does not compute"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"layer_types": ["chunked_attention"] * 4}, "'chunked_attention' in layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"no_rope_layers": [1, 1]}, "of 2 layers what they are, and has 4"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, changes: dict[str, object], text: str) -> None:
    """Weights that would be misread are refused in one sentence."""
    refused(tmp_path, "SmolLM3", changes, text)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("Bamba", {"mamba_expand": 3}, "mamba_n_heads x mamba_d_head unlike mamba_expand"),
        ("Bamba", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit = \[0.0, 0.1\]"),
        ("Bamba", {"mamba_proj_bias": True}, "mamba_proj_bias = True"),
        ("Bamba", {"mamba_d_conv": 3}, "needs model.state_conv = 3, not 4"),
        (
            "Bamba",
            {"rope_parameters": None, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "partial_rotary_factor = 1.0, in place of which transformers takes 0.5",
        ),
        ("Gemma 2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping = 0; null is no bound"),
        ("Gemma 2", {"layer_types": None, "_sliding_window_pattern": 3}, "= 3, in place of which transformers takes 2"),
        ("Gemma 3", {"layer_types": None, "_sliding_window_pattern": 3}, "= 3, in place of which transformers takes 6"),
        ("Mistral", {"sliding_window": 0}, "sliding_window = 0; null is no window"),
        ("DeepSeek-V3", {"head_dim": 2}, "head_dim 2, which is not qk_rope_head_dim"),
        ("Gemma 3", {"attn_logit_softcapping": 0.5}, "attn_logit_softcapping = 0.5, which this trainer does not"),
        (
            "Gemma 3",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "a form that transformers does not read",
        ),
        ("Bamba", {"hidden_act": "gelu"}, "hidden_act 'gelu', which transformers also applies to the convolutions"),
        (
            "Qwen 3 Next",
            {"hidden_act": "gelu"},
            "hidden_act 'gelu', which transformers also applies to the convolutions",
        ),
        (
            "Qwen 3 Next",
            {"rope_parameters": None, "rope_theta": 1e4, "partial_rotary_factor": 0.0},
            "factor = 0.0; without",
        ),
        ("Qwen 3 Next", {"full_attention_interval": 0}, "a number, that cannot be"),
        ("Qwen 3 Next", {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention' in layer_types"),
        ("Qwen 3 Next", {"shared_expert_intermediate_size": 18}, "which is not a multiple of moe_intermediate_size"),
        ("Qwen 3 Next", {"linear_num_key_heads": 4}, "needs model.state_key_heads = 4, not 2"),
    ],
)
def test_other_scores_and_states_are_refused(tmp_path: Path, name: str, changes: dict[str, object], text: str) -> None:
    """What layers of attention, or with a state, would compute otherwise."""
    refused(tmp_path, name, changes, text)


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("model.embed_tokens.weight", (80, 32), r"of shape \[80, 32\], not \[64, 32\]"),
        ("model.layers.0.self_attn.q_proj.weight", None, "has no tensor model.layers.0.self_attn.q_proj.weight"),
        ("model.layers.0.self_attn.q_proj.bias", (32,), "q_proj.bias, which the model has not"),
        ("model.norm.weight", "int8", "model.norm.weight as I8"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, name: str, shape: Any, text: str) -> None:
    """A tensor that is too large was cut to size, one that the model has not was left out, both without a word."""
    from safetensors.torch import load_file, save_file

    theirs("SmolLM3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = tensors[name].to(torch.int8) if shape == "int8" else torch.ones(shape)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=text):
        ours(tmp_path)


def test_a_tied_projection_unlike_the_embedding_is_refused(tmp_path: Path) -> None:
    """Transformers uses both then, whatever the file says; one that is stored twice is no error."""
    from safetensors.torch import load_file, save_file

    theirs("SmolLM2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    ours(tmp_path)
    save_file({**tensors, "lm_head.weight": head + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"another lm_head.weight than model.embed_tokens.weight, while .* to false"):
        ours(tmp_path)


def test_two_models_in_a_folder_are_refused(tmp_path: Path) -> None:
    """Saved in one file and then in several, transformers leaves the first and reads it; vLLM reads the others."""
    theirs("SmolLM3", tmp_path).save_pretrained(tmp_path, max_shard_size="20KB")
    with pytest.raises(ConfigError, match=r"both model\.safetensors and model.safetensors.index.json"):
        ours(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    ours(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Weights in the pickle format are not opened; the sentence says how to convert them."""
    theirs("SmolLM3", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safe_serialization=True"):
        ours(tmp_path)
