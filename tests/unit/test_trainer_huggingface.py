"""Models of Hugging Face in and out, checked with its own implementation on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from opsd.preflight import plan
from opsd.trainer.cache import Cache
from opsd.trainer.config import ConfigError, load
from opsd.trainer.hf.architectures import ARCHITECTURES, SHAPE
from opsd.trainer.hf.config import config_of, settings_of
from opsd.trainer.hf.dual_chunk import FIELD
from opsd.trainer.hf.weights import CONFIG, fill, write
from opsd.trainer.huggingface import main
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.stored import Chunk, Stored

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


def export(model: Decoder, folder: Path) -> None:
    tensors = [
        Stored(name, tuple(value.shape), [Chunk((0,) * value.dim(), tuple(value.shape), value.detach().clone)])
        for name, value in model.saved()
    ]
    write(folder, tensors, torch.float32, *config_of(model.settings, 64))


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if isinstance(model, Decoder):
            found: torch.Tensor = model(tokens, torch.zeros(2, 24, dtype=torch.int32))
            return found
        return model(tokens, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_in_and_out_with_the_same_logits(tmp_path: Path, name: str) -> None:
    """What transformers saved has its logits here; what is exported again has them there."""
    model = theirs(name, tmp_path / "theirs")
    expected = logits(model)
    mine = ours(tmp_path / "theirs")
    scale = expected.abs().max().item()
    torch.testing.assert_close(logits(mine), expected, rtol=0, atol=1e-5 * scale)
    export(mine, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-5 * scale)
    assert settings_of(json.loads((tmp_path / "ours" / CONFIG).read_text())).architecture == mine.settings.architecture


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-V2", "DeepSeek-V3", "Qwen 3 MoE", "Gemma 2"])
def test_read_token_by_token(tmp_path: Path, name: str) -> None:
    """With a cache, from which latent attention reads in its absorbed form, the logits are those of transformers."""
    expected, mine, cache = logits(theirs(name, tmp_path)), ours(tmp_path), Cache()
    tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        documents = torch.zeros(2, 24, dtype=torch.int32)
        parts = [mine(tokens[:, at : at + 1], documents[:, : at + 1], cache=cache) for at in range(24)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.kind)
def test_defaults_are_those_of_transformers(architecture: Any) -> None:
    """A field that a file leaves out has the value that transformers gives it."""
    needed = {"num_experts_per_tok": 6} if architecture.kind == "deepseek_v2" else {}
    config = transformers.AutoConfig.for_model(architecture.kind, **needed)
    full = settings_of(config.to_dict())
    shape = {name: getattr(config, name) for name in SHAPE.values() if name not in architecture.defaults} | needed
    assert settings_of({"model_type": architecture.kind, **shape}).architecture == full.architecture


def test_their_files_can_be_read(tmp_path: Path) -> None:
    """What transformers itself saves is imported, in half precision and split over files too."""
    model = theirs("SmolLM3", tmp_path / "whole")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "split", max_shard_size="20KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 1
    for one, other in zip(ours(tmp_path / "whole").parameters(), ours(tmp_path / "split").parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other)


def test_smollm3_as_published() -> None:
    """The configuration of SmolLM3-3B-Base becomes the settings of our preset."""
    config = transformers.SmolLM3Config(rope_parameters={"rope_type": "default", "rope_theta": 5e4}).to_dict()
    settings = settings_of(config)
    assert (settings.layers, settings.width, settings.kv_heads, settings.nope_every) == (36, 2048, 4, 4)
    assert settings.tied
    assert settings.window == 0


def test_qwen3_next_as_published() -> None:
    """80 billion parameters, of which a token meets 3 to 4 (with both embeddings), as its authors say."""
    settings = settings_of(transformers.Qwen3NextConfig(rope_parameters={"rope_theta": 1e7}).to_dict())
    count = plan.parameters(settings)
    assert count == pytest.approx(80e9, rel=0.01)
    assert 3e9 < count - settings.idle_parameters < 4e9
    assert settings.kinds[:4] == ("delta", "delta", "delta", "global")
    assert settings.rotary_channels == 64


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Qwen3Moe"])
def test_dual_chunks_in_a_file(name: str) -> None:
    """Every field becomes a setting and is exported again; what vLLM adds where one is missing is added here."""
    config = getattr(transformers, f"{name}Config")(**TINY).to_dict()
    settings = settings_of(config | {FIELD: DUAL_CHUNKS})
    assert set(settings.kinds) == {"dual_chunk"}
    assert (settings.dual_chunk, settings.dual_chunk_local, settings.dual_chunk_positions) == (40, 8, 32)
    assert config_of(settings, 64)[1][FIELD] == DUAL_CHUNKS
    few = settings_of(config | {FIELD: {"chunk_size": 3000}})
    assert (few.dual_chunk, few.dual_chunk_local, few.dual_chunk_positions) == (3000, 1024, 0)


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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "lacks factor for rope_type llama3"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
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
    theirs("SmolLM3", tmp_path)
    model = ours(tmp_path)
    changed(tmp_path, changes)
    with pytest.raises(ConfigError, match=text):
        fill(model, tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("Bamba", {"mamba_expand": 3}, "mamba_n_heads x mamba_d_head unlike mamba_expand"),
        ("Bamba", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit = \[0.0, 0.1\]"),
        ("Bamba", {"mamba_proj_bias": True}, "mamba_proj_bias = True"),
        ("Bamba", {"mamba_d_conv": 3}, "needs model.state_conv = 3, not 4"),
        ("Qwen 3 Next", {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention' in layer_types"),
        ("Qwen 3 Next", {"shared_expert_intermediate_size": 18}, "which is not a multiple of moe_intermediate_size"),
        ("Qwen 3 Next", {"linear_num_key_heads": 4}, "needs model.state_key_heads = 4, not 2"),
    ],
)
def test_other_states_are_refused(tmp_path: Path, name: str, changes: dict[str, object], text: str) -> None:
    """What layers with a state would compute otherwise."""
    theirs(name, tmp_path)
    model = ours(tmp_path)
    changed(tmp_path, changes)
    with pytest.raises(ConfigError, match=text):
        fill(model, tmp_path)


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


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Weights in the pickle format are not opened; the sentence says how to convert them."""
    theirs("SmolLM3", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safe_serialization=True"):
        ours(tmp_path)


@pytest.mark.parametrize(
    ("preset", "name", "read"),
    [
        ("tiny", "SmolLM3ForCausalLM", {"head_dim": 32, "no_rope_layers": [1, 1, 1, 0]}),
        (
            "tiny-mla", "DeepseekV2ForCausalLM",
            {
                "first_k_dense_replace": 4, "intermediate_size": 320, "kv_lora_rank": 64, "q_lora_rank": 96,
                "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "tie_word_embeddings": True,
            },
        ),
    ],
)  # fmt: skip
def test_presets_have_what_converters_read(preset: str, name: str, read: dict[str, object]) -> None:
    """The name of the architecture, and the fields that llama.cpp's converter reads of DeepSeek-V2.

    Without experts it takes ``n_routed_experts`` to be absent, and ``intermediate_size`` for that of experts.
    """
    model = load(preset, ["data.shards=/shards"], {}).model
    config = config_of(model, 256)[1]
    assert config["architectures"] == [name]
    assert read.items() <= config.items()
    assert "n_routed_experts" not in config


@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-hybrid"])
def test_presets_that_no_architecture_has_are_not_exported(preset: str) -> None:
    """Shared experts with grouped keys and a sigmoid, and two kinds of states, are nobody's: one sentence says so."""
    with pytest.raises(ConfigError, match="no architecture of Hugging Face"):
        config_of(load(preset, ["data.shards=/shards"], {}).model, 256)


def test_what_they_do_not_have_is_not_exported() -> None:
    """QK-norm with layers without positions has no architecture there."""
    settings = ModelSettings(layers=4, width=32, heads=4, kv_heads=2, ffn=48, vocab=64, qk_norm=True)
    with pytest.raises(ConfigError, match="no architecture"):
        config_of(settings, 64)


def test_verify_compares_with_transformers(tmp_path: Path) -> None:
    """The command says how far the logits are apart; what transformers computes otherwise ends with 1."""
    theirs("Gemma 2", tmp_path)
    good = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert good.exit_code == 0, good.output
    assert "4 of 4 layers" in good.output
    part = CliRunner().invoke(main, ["verify", str(tmp_path), "--layers", "2"])
    assert "2 of 4 layers" in part.output, part.output


def test_settings_are_printed_as_toml(tmp_path: Path) -> None:
    """The printed section gives the same model again."""
    import tomllib

    theirs("Gemma 3, scaled", tmp_path)
    printed = CliRunner().invoke(main, ["settings", str(tmp_path)]).output
    assert ModelSettings(**tomllib.loads(printed)["model"]).architecture == ours(tmp_path).settings.architecture
