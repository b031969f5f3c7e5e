"""Export to and import from Hugging Face, checked with its own implementation on the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from opsd.trainer.config import ConfigError
from opsd.trainer.huggingface import CONFIG, fill, hf_config, settings_of, write
from opsd.trainer.model import Decoder
from opsd.trainer.settings import ModelSettings
from opsd.trainer.tensors import Chunk, Stored

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

SHAPE = ModelSettings(layers=4, width=32, heads=4, kv_heads=2, ffn=48, vocab=64)
KINDS: dict[str, dict[str, object]] = {
    "smollm3": {},
    "llama, all heads": {"nope_every": 0, "kv_heads": 4, "tied": False},
    "llama, one head": {"nope_every": 0, "kv_heads": 1},
    "llama, yarn": {"nope_every": 0, "yarn_factor": 4.0, "yarn_positions": 16, "rope_theta": 1000.0},
    "smollm3, window": {"window": 5},
    "qwen3": {"nope_every": 0, "qk_norm": True},
}


def decoder(seed: int = 0, **changes: object) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(SHAPE.model_copy(update=changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return model


def export(model: Decoder, folder: Path) -> None:
    tensors = [
        Stored(name, tuple(value.shape), [Chunk((0,) * value.dim(), tuple(value.shape), value.detach().clone)])
        for name, value in model.named_parameters()
    ]
    write(folder, tensors, torch.float32, hf_config(model.settings, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_their_model_computes_what_ours_does(tmp_path: Path, kind: str) -> None:
    """The exported model, loaded by transformers, has our logits; imported again it has our bits."""
    model = decoder(**KINDS[kind])
    export(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert theirs.config.model_type == kind.partition(",")[0]
    tokens = torch.randint(0, SHAPE.vocab, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model(tokens, torch.zeros(2, 24, dtype=torch.int32))
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    again = decoder(seed=1, **KINDS[kind])
    fill(again, tmp_path)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_their_files_can_be_read(tmp_path: Path) -> None:
    """What transformers itself saves is imported, in half precision and split over files too."""
    model = decoder()
    export(model, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    again = decoder(seed=1)
    fill(again, tmp_path / "theirs")
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other)


def test_smollm3_as_published() -> None:
    """The configuration of SmolLM3-3B-Base becomes the settings of our preset."""
    config = transformers.SmolLM3Config(rope_parameters={"rope_type": "default", "rope_theta": 5e4}).to_dict()
    settings = ModelSettings(**settings_of(config))
    assert (settings.layers, settings.width, settings.kv_heads, settings.nope_every) == (36, 2048, 4, 4)
    assert settings.tied
    assert settings.window == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type 'llama3'"),
        ({"no_rope_layers": [0, 1, 1, 0]}, "not every n-th"),
        ({"intermediate_size": 50}, "needs model.ffn = 50, not 48"),
        ({"hidden_size": None}, "needs model.width"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, changes: dict[str, object], text: str) -> None:
    """Weights that would be misread are refused in one sentence."""
    model = decoder()
    export(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=text):
        fill(model, tmp_path)


def test_what_they_do_not_have_is_not_exported() -> None:
    """QK-norm with layers without positions has no architecture there."""
    with pytest.raises(ConfigError, match="no architecture"):
        hf_config(SHAPE.model_copy(update={"qk_norm": True}), 64)
