"""Checkpoints of torchtitan, nanotron and Megatron-LM, imported with the logits of the model that they have."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from opsd.trainer.huggingface import main, run
from tests.fakes.foreign import save_megatron, save_nanotron, save_titan
from tests.fakes.hf_models import TINY, ours, transformers

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
QWEN2: dict[str, Any] = {"is_qwen2_config": True, "rope_interleaved": False}


def model(kind: str, **changes: Any) -> Any:
    """A random model, with rotations that differ from those of another base."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**TINY | {"rope_parameters": {"rope_theta": 500.0}} | changes)
    made = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def logits(of: Any) -> torch.Tensor:
    tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if isinstance(of, transformers.PreTrainedModel):
            return of(tokens, use_cache=False).logits  # type: ignore[no-any-return]
        return of(tokens, torch.zeros(2, 24, dtype=torch.int32))  # type: ignore[no-any-return]


def imported(folder: Path, *options: str) -> tuple[int, str]:
    """The exit code of the command, and what it has printed."""
    result = CliRunner().invoke(main, ["import", str(folder), str(folder.parent / "hf"), *options])
    if result.exception is None or isinstance(result.exception, SystemExit):
        return result.exit_code, result.output
    raised = result.exception

    def again() -> None:
        raise raised

    with pytest.raises(SystemExit) as ended:
        run(again)
    return int(str(ended.value.code)), str(raised)


def titan(made: Any, folder: Path) -> list[str]:
    save_titan(made, folder)
    made.config.to_json_file(folder.parent / "given.json")
    return ["--config", str(folder.parent / "given.json")]


Save = Callable[[Any, Path], object]
CASES: dict[str, tuple[str, dict[str, Any], Save]] = {
    "torchtitan, Llama 3": ("Llama", {"rope_parameters": LLAMA3}, titan),
    "torchtitan, tied": ("Llama", {"tie_word_embeddings": True}, titan),
    "torchtitan, Qwen 3": ("Qwen3", {"head_dim": 16}, titan),
    "nanotron, Llama": ("Llama", {}, lambda made, folder: save_nanotron(
        made, folder, 2, {"is_llama_config": True, "rope_interleaved": False})),
    "nanotron, neighbours": ("Llama", {"tie_word_embeddings": True}, lambda made, folder: save_nanotron(
        made, folder, 1, {"is_llama_config": True, "rope_interleaved": True})),
    "nanotron, Qwen 2": ("Qwen2", {}, lambda made, folder: save_nanotron(
        made, folder, 2, QWEN2 | {"attention_bias": True})),
    "nanotron, SmolLM3": ("SmolLM3", {"no_rope_layer_interval": 2}, lambda made, folder: save_nanotron(
        made, folder, 2, QWEN2 | {"no_rope_layer": 2, "attention_bias": False})),
    "Megatron-LM": ("Llama", {}, lambda made, folder: save_megatron(made, folder, 1, 1)),
    "Megatron-LM, TP 2 x PP 2": ("Llama", {"tie_word_embeddings": True}, lambda made, folder: save_megatron(
        made, folder, 2, 2)),
    "Megatron-LM, fused, Llama 3": ("Llama", {"rope_parameters": LLAMA3}, lambda made, folder: save_megatron(
        made, folder, 2, 1, fused=True, use_rope_scaling=True)),
    "Megatron-LM, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, lambda made, folder: save_megatron(
        made, folder, 2, 1, add_bias_linear=True)),
    "Megatron-LM, Qwen 2": ("Qwen2", {}, lambda made, folder: save_megatron(made, folder, 2, 4, add_qkv_bias=True)),
    "Megatron-LM, Qwen 3": ("Qwen3", {"head_dim": 16}, lambda made, folder: save_megatron(
        made, folder, 1, 2, qk_layernorm=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_imported_with_the_same_logits(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The imported model has the logits of the one whose weights were saved, here and in transformers."""
    kind, changes, save = CASES[name]
    made = model(kind, **changes)
    folder = tmp_path / "theirs"
    folder.mkdir()
    options = save(made, folder)
    assert imported(folder, *(options if isinstance(options, list) else []))[0] == 0
    expected = logits(made)
    for again in (
        ours(tmp_path / "hf"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager"),
    ):
        torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert "built" not in capsys.readouterr().out


def _without(path: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = next(iter(sorted(folder.glob(path))))
        shutil.rmtree(found) if found.is_dir() else found.unlink()

    return change


def _copied(path: str, name: str, other: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = next(iter(sorted(folder.glob(path))))
        shutil.copyfile(found, str(found).replace(name, other))

    return change


def _cut(path: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        found = next(iter(sorted(folder.glob(path))))
        found.write_bytes(found.read_bytes()[: found.stat().st_size // 2])

    return change


def _fields(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _tensors(path: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        found = next(iter(sorted(folder.glob(path))))
        if found.suffix == ".safetensors":
            tensors = load_file(found)
            change(tensors)
            save_file(tensors, found)
            return
        content = torch.load(found, weights_only=False)
        change(content)
        torch.save(content, found)

    return changed


def _args(**changes: object) -> Callable[[Path], None]:
    return _tensors("*/*_00/model_optim_rng.pt", lambda content: vars(content["args"]).update(changes))


class Evil:
    """Writes a file when it is built."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("built"),)


FIRST = "*/mp_rank_00/*.pt"
REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no such checkpoint": ("megatron", _without("*"), "does not exist|is no checkpoint of torchtitan"),
    "titan: no configuration": ("titan", _without("../given.json"), "give the config.json of Hugging Face"),
    "titan: a file is gone": ("titan", _without("*.distcp"), "No such file"),
    "titan: a file is cut": ("titan", _cut("*.distcp"), "cannot be read"),
    "titan: metadata is cut": ("titan", _cut(".metadata"), "cannot be read|damaged"),
    "nanotron: a rank is gone": (
        "nanotron", _without("model/model/decoder/1/**/*tp-rank-1-of-2*"),
        r"no part of tensor-parallel rank 1 of 2 of model\.decoder\.1",
    ),
    "nanotron: a parameter is gone": (
        "nanotron", _without("model/model/decoder/2/pp_block/mlp/down_proj"),
        r"has no tensor model\.decoder\.2\.pp_block\.mlp\.down_proj\.weight \(1 missing, 0 unknown\)",
    ),
    "nanotron: a rank is a copy": (
        "nanotron",
        _copied("model/**/mlp/gate_up_proj/*tp-rank-0-*", "tp-rank-0", "tp-rank-1"),
        "has only a part of model.decoder.0.pp_block.mlp.gate_up_proj.weight",
    ),
    "nanotron: no sizes": ("nanotron", _fields(num_attention_heads="4"), "num_attention_heads|heads"),
    "nanotron: no heads": ("nanotron", _fields(num_attention_heads=0), "heads"),
    "megatron: a rank is a copy": (
        "megatron",
        _copied("*/mp_rank_00/*.pt", "mp_rank_00", "mp_rank_01"),
        "mp_rank_01 has the weights of mp_rank_00",
    ),
    "megatron: no size": ("megatron", _args(kv_channels="8"), "head_dim"),
    "megatron: no groups": ("megatron", _args(num_query_groups=3), "kv_heads 3"),
    "nanotron: a file is cut": ("nanotron", _cut("model/**/*.safetensors"), "cannot be read"),
    "nanotron: sizes of another model": ("nanotron", _fields(intermediate_size=40), "shape"),
    "nanotron: windows": ("nanotron", _fields(sliding_window_size=8), "sliding_window_size = 8; only None"),
    "nanotron: experts": ("nanotron", _fields(moe_config={"num_experts": 8}), "moe_config = "),
    "nanotron: an unknown field": ("nanotron", _fields(qk_norm=True), "qk_norm = True"),
    "nanotron: another model": ("nanotron", _fields(is_llama_config=False), "not of nanotron's Llama or Qwen 2"),
    "nanotron: more layers": ("nanotron", _fields(num_hidden_layers=5), r"has no tensor model\.decoder\.4"),
    "nanotron: fewer layers": ("nanotron", _fields(num_hidden_layers=3), r"tensor model\.decoder\.3.* has not"),
    "megatron: a rank is gone": ("megatron", _without("*/mp_rank_01"), "has 1 folders .* say 2 tensor-parallel"),
    "megatron: a rank's file is gone": ("megatron", _without("*/mp_rank_01/*"), "mp_rank_01 has no model_optim_rng"),
    "megatron: a file is cut": ("megatron", _cut("*/mp_rank_01/*"), "cannot be read"),
    "megatron: no arguments": ("megatron", _tensors(FIRST, lambda c: c.pop("args")), "arguments of Megatron-LM"),
    "megatron: no model": ("megatron", _tensors(FIRST, lambda c: c.pop("model")), "has no model"),
    "megatron: another iteration": ("megatron", _tensors(FIRST, lambda c: c.update(iteration=8)), "another iteration"),
    "megatron: a tensor is gone": (
        "megatron", _tensors(FIRST, lambda c: c["model"].pop("output_layer.weight")), "output_layer.weight of 1 of 2",
    ),
    "megatron: another norm": ("megatron", _args(normalization="LayerNorm"), "normalization = 'LayerNorm'"),
    "megatron: experts": ("megatron", _args(num_experts=8), "num_experts = 8; only None"),
    "megatron: no gate": ("megatron", _args(swiglu=False), "swiglu = False; only True"),
    "megatron: part of the channels": ("megatron", _args(rotary_percent=0.5), "rotary_percent = 0.5"),
    "megatron: unlike norms": (
        "megatron", _tensors(FIRST, lambda c: c["model"]["decoder.final_layernorm.weight"].add_(1)),
        "final_layernorm.weight with unlike values",
    ),
    "megatron: torch_dist": (
        "titan", lambda folder: (folder / "common.pt").touch(), "torch_dist .* --ckpt-convert-format torch",
    ),
    "megatron: an object of the file": (
        "megatron", _tensors(FIRST, lambda c: c["model"].update(extra=Evil())), "without executing",
    ),
    "megatron: a pickle of another protocol": (
        "megatron", lambda folder: (folder / "iter_0000007/mp_rank_00/model_optim_rng.pt").write_bytes(
            pickle.dumps({"args": Evil()})), "cannot be read|damaged|without executing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_or_partial_checkpoint_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence with exit code 2, and nothing is written; no object of a file is ever built."""
    kind, change, text = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    made, folder = model("Llama"), tmp_path / "theirs"
    folder.mkdir()
    options: list[str] = []
    if kind == "titan":
        options = titan(made, folder)
    elif kind == "nanotron":
        save_nanotron(made, folder, 2, {"is_llama_config": True, "rope_interleaved": False})
    else:
        save_megatron(made, folder, 2, 1)
    change(folder)
    code, said = imported(folder, *(options if (tmp_path / "given.json").exists() else []))
    assert not Path("built").exists()
    assert (code, len(said.strip().splitlines())) == (2, 1), said
    assert re.search(text, said), said
    assert not (tmp_path / "hf").exists()
