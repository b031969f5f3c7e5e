"""Models of Hugging Face in and out, and those that are refused by the name of the field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from opsd.trainer.attention import Cache
from opsd.trainer.config import ConfigError, load
from opsd.trainer.counts import parameters
from opsd.trainer.hf.architectures import ARCHITECTURES, SHAPE
from opsd.trainer.hf.blocks import CHUNKS
from opsd.trainer.hf.config import config_of, settings_of
from opsd.trainer.hf.verify import Comparison, compare, demand_judge
from opsd.trainer.hf.weights import CONFIG, fill, write
from opsd.trainer.huggingface import main
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.tensors import Chunk, Stored
from tests.fakes.hf_models import DUAL_CHUNKS, MODELS, TINY, WINDOWED, YARN, ours, theirs, transformers

# Models of Hugging Face in and out, checked with its own implementation on the same weights.


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
    # The delta rule of Qwen 3 Next in float32 is as far as 1e-5 from the same in float64, here and in transformers.
    limit = (3e-5 if name.startswith("Qwen 3 Next") else 1e-5) * expected.abs().max().item()
    torch.testing.assert_close(logits(mine), expected, rtol=0, atol=limit)
    export(mine, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    torch.testing.assert_close(logits(again), expected, rtol=0, atol=limit)
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


def test_both_forms_of_rotary_positions(tmp_path: Path) -> None:
    """The earlier form replaces the later one whole, the base of the rotation included."""
    theirs("SmolLM2", tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    config.pop("rope_theta", None)
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(logits(ours(tmp_path)), logits(again), rtol=0, atol=1e-5 * logits(again).abs().max())


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
    count = parameters(settings)
    assert count == pytest.approx(80e9, rel=0.01)
    assert 3e9 < count - settings.idle_parameters < 4e9
    assert settings.kinds[:4] == ("delta", "delta", "delta", "global")
    assert settings.rotary_channels == 64


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Qwen3Moe"])
def test_dual_chunks_in_a_file(name: str) -> None:
    """Every field becomes a setting and is exported again; what vLLM adds where one is missing is added here."""
    config = getattr(transformers, f"{name}Config")(**TINY).to_dict()
    settings = settings_of(config | {CHUNKS: DUAL_CHUNKS})
    assert set(settings.kinds) == {"dual_chunk"}
    assert (settings.dual_chunk, settings.dual_chunk_local, settings.dual_chunk_positions) == (40, 8, 32)
    assert config_of(settings, 64)[1][CHUNKS] == DUAL_CHUNKS
    few = settings_of(config | {CHUNKS: {"chunk_size": 3000}})
    assert (few.dual_chunk, few.dual_chunk_local, few.dual_chunk_positions) == (3000, 1024, 0)


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


@pytest.mark.parametrize("name", ["Gemma 2", "Bamba", "Qwen 3 Next", "SmolLM3"])
def test_verify_compares_with_transformers(tmp_path: Path, name: str) -> None:
    """The command says how far the logits of all or some layers are apart."""
    theirs(name, tmp_path)
    for options, layers in (((), 4), (("--layers", "2"), 2)):
        found = CliRunner().invoke(main, ["verify", str(tmp_path), *options])
        assert found.exit_code == 0, found.output
        assert f"{layers} of 4 layers" in found.output


def test_what_transformers_raises_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, and however long."""

    def raising(*_arguments: object, **_options: object) -> None:
        raise AttributeError("no setter\nand more")

    theirs("SmolLM3", tmp_path)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", raising)
    with pytest.raises(ConfigError, match=r"transformers cannot load .*: no setter$"):
        compare(tmp_path)


def test_settings_are_printed_as_toml(tmp_path: Path) -> None:
    """The printed section gives the same model again."""
    import tomllib

    theirs("Gemma 3, scaled", tmp_path)
    printed = CliRunner().invoke(main, ["settings", str(tmp_path)]).output
    assert ModelSettings(**tomllib.loads(printed)["model"]).architecture == ours(tmp_path).settings.architecture


def test_an_old_transformers_is_not_the_judge() -> None:
    """A difference from a version with known errors is no verdict about the model; equality is one."""
    same, different = Comparison(1e-6, 2, 2), Comparison(0.1, 2, 2)
    demand_judge(same, "5.14.0")
    demand_judge(different, "5.23.1.dev0")
    with pytest.raises(ConfigError, match=r"differ from those of transformers 5\.14\.0"):
        demand_judge(different, "5.14.0")


# Models of Hugging Face that this trainer would compute otherwise are refused by the name of the field.


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("Llama", {CHUNKS: DUAL_CHUNKS}, f"{CHUNKS} = .* does not compute for llama"),
        ("Qwen2", {CHUNKS: DUAL_CHUNKS | {"sparse_attention_config": [{}]}}, f"sparse_attention_config in {CHUNKS}"),
        (
            "Qwen2",
            {CHUNKS: DUAL_CHUNKS, "use_sliding_window": True, "sliding_window": 5, "layer_types": WINDOWED},
            f"{CHUNKS} with windows",
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
