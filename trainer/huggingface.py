"""Weights to and from Hugging Face: ``python -m opsd.trainer.huggingface export CONFIG TARGET``, ``… settings FOLDER``.

The layout is that of Llama, of SmolLM3 where layers have no positions or a window, and of Qwen 3 with QK-norm. To begin
a run with the weights of a folder, set ``run.initial`` to it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from opsd.checkpoints.manifest import CheckpointError, folder_of, steps, verify
from opsd.trainer.config import CHECKPOINTS, Config, ConfigError, load
from opsd.trainer.data.shards import DOCUMENT, TOKENIZER
from opsd.trainer.model import Decoder, has_rotary
from opsd.trainer.regions import region_of
from opsd.trainer.settings import ModelSettings
from opsd.trainer.tensors import Stored, tensors_of_files

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
FILE_BYTES = 4_000_000_000
"""File size from which the next tensor goes into another file."""

_NAMES = {
    "embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj", "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "ffn.gate": "mlp.gate_proj", "ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj",
}  # fmt: skip
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def hf_name(name: str) -> str:
    """Hugging Face's name of our parameter ``name``."""
    match = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.weight", name)
    assert match
    layer, part = match.groups()
    return f"model.layers.{layer}.{_NAMES[part]}.weight" if layer else f"{_NAMES[part]}.weight"


def hf_config(model: ModelSettings, sequence: int) -> dict[str, Any]:
    """``config.json`` of the model. Raises ConfigError if no supported architecture has its combination of settings."""
    partial = bool(model.nope_every or model.window)
    if model.qk_norm and partial:
        raise ConfigError("Hugging Face has no architecture with model.qk_norm and model.nope_every or model.window")
    kind, name = ("qwen3", "Qwen3") if model.qk_norm else ("smollm3", "SmolLM3") if partial else ("llama", "Llama")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.yarn_factor > 1:
        rope |= {
            "rope_type": "yarn", "factor": model.yarn_factor, "original_max_position_embeddings": model.yarn_positions,
        }  # fmt: skip
    config = {
        "architectures": [f"{name}ForCausalLM"], "model_type": kind, "hidden_act": "silu",
        "num_hidden_layers": model.layers, "hidden_size": model.width, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim, "intermediate_size": model.ffn,
        "vocab_size": model.vocab, "rms_norm_eps": model.norm_eps, "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied, "attention_bias": False, "mlp_bias": False,
        "max_position_embeddings": max(sequence, int(model.yarn_factor * model.yarn_positions)),
        "rope_parameters": rope, "rope_theta": model.rope_theta,
        "rope_scaling": rope if model.yarn_factor > 1 else None,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if kind == "smollm3":
        rotary = [has_rotary(layer, model) for layer in range(model.layers)]
        config |= {
            "no_rope_layers": list(map(int, rotary)),
            "use_sliding_window": bool(model.window), "sliding_window": model.window or None,
            "layer_types": ["sliding_attention" if r and model.window else "full_attention" for r in rotary],
        }  # fmt: skip
    return config


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``[model]`` settings equivalent to ``config.json``. Raises ConfigError for unsupported models."""
    kind = config.get("model_type")
    if kind not in ("llama", "smollm3", "qwen3"):
        raise ConfigError(f"config.json has model_type {kind!r}; llama, smollm3 and qwen3 can be used")
    rope = config.get("rope_parameters") or {"rope_type": "default"} | (config.get("rope_scaling") or {})
    if rope["rope_type"] not in ("default", "yarn"):
        raise ConfigError(f"config.json has rope_type {rope['rope_type']!r}; default and yarn can be used")
    layers = config["num_hidden_layers"]
    without = [index + 1 for index, rotary in enumerate(config.get("no_rope_layers") or []) if not rotary]
    every = without[0] if without else 0
    if without != [number for number in range(1, layers + 1) if every and number % every == 0]:
        raise ConfigError(f"config.json has layers {without} without positions, which are not every n-th")
    yarn = rope["rope_type"] == "yarn"
    return {
        "layers": layers, "width": config["hidden_size"], "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"], "ffn": config["intermediate_size"], "vocab": config["vocab_size"],
        "rope_theta": float(rope.get("rope_theta") or config["rope_theta"]), "nope_every": every,
        "norm_eps": config["rms_norm_eps"], "tied": config.get("tie_word_embeddings", False),
        "window": (config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0,
        "qk_norm": kind == "qwen3",
        "yarn_factor": float(rope["factor"]) if yarn else 1.0,
        "yarn_positions": rope["original_max_position_embeddings"] if yarn else 0,
    }  # fmt: skip


@torch.no_grad()
def fill(model: Decoder, folder: Path) -> None:
    """Load the weights in ``folder`` into this rank's part of ``model``. Raises ConfigError if they do not fit."""
    try:
        wanted = settings_of(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
        for key, value in wanted.items():
            if (ours := getattr(model.settings, key)) != value:
                raise ConfigError(f"run.initial: {folder / CONFIG} needs model.{key} = {value}, not {ours}")
        index = folder / INDEX
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.exists() else {}
        for name, parameter in model.named_parameters():
            region, theirs = region_of(parameter), hf_name(name)
            with safe_open(folder / places.get(theirs, SINGLE), framework="pt") as file:
                region.local.copy_(file.get_slice(theirs)[region.slices])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"run.initial: {folder} cannot be used: {error}") from error


def write(folder: Path, tensors: Iterable[Stored], dtype: torch.dtype, config: Mapping[str, Any]) -> int:
    """Write our parameters as a Hugging Face model into ``folder``; returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    size = 0
    for number, group in enumerate(_groups(tensors, dtype), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(group, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(group, file)
        size += sum(tensor.nbytes for tensor in group.values())
    if len(set(names.values())) == 1:
        (folder / next(iter(names.values()))).rename(folder / SINGLE)
    else:
        index = {"metadata": {"total_size": size}, "weight_map": names}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    text = json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=1)
    (folder / CONFIG).write_text(text, encoding="utf-8")
    return len(names)


def _groups(tensors: Iterable[Stored], dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    group: dict[str, torch.Tensor] = {}
    for stored in tensors:
        group[hf_name(stored.name)] = stored.read().to(dtype).contiguous()
        if sum(tensor.nbytes for tensor in group.values()) > FILE_BYTES:
            yield group
            group = {}
    if group:
        yield group


def parameters_in(checkpoint: Path) -> Iterator[Stored]:
    """The model's parameters in one of our checkpoints, which is verified first. Raises CheckpointError."""
    files = [checkpoint / entry.name for entry in verify(checkpoint).files]
    for stored in tensors_of_files(checkpoint, files):
        if stored.name.startswith("model."):
            yield Stored(stored.name.removeprefix("model."), stored.shape, stored.chunks)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Export checkpoints as Hugging Face models, and read the settings of such models."""


@main.command()
@click.argument("config")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one setting.")
@click.option("--step", type=int, help="Of which checkpoint; the newest by default.")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="bfloat16", show_default=True)
def export(config: str, target: Path, overrides: tuple[str, ...], step: int | None, dtype: str) -> None:
    """Write a checkpoint of the run that CONFIG describes as a Hugging Face model into the folder TARGET."""
    settings = load(config, overrides)
    root = Path(settings.run.folder) / CHECKPOINTS
    if not (found := steps(root)):
        raise ConfigError(f"{root} has no checkpoint; set run.folder to the folder of the run")
    folder = folder_of(root, found[-1] if step is None else step)
    count = export_checkpoint(settings, folder, target, _DTYPES[dtype])
    click.echo(f"{count} tensors of {folder} written to {target}")


def export_checkpoint(settings: Config, folder: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write the checkpoint in ``folder`` as a model with its tokenizer to ``target``; returns the number of tensors.

    Raises CheckpointError or OSError.
    """
    count = write(target, parameters_in(folder), dtype, hf_config(settings.model, settings.data.sequence))
    corpora = [".", *settings.data.sources]
    paths = [Path(root, name, TOKENIZER) for root in (settings.data.shards, settings.data.fallback) for name in corpora]
    if tokenizer := next((path for path in paths if path.is_file()), None):
        shutil.copyfile(tokenizer, target / TOKENIZER)
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": settings.data.sequence,
            "bos_token": DOCUMENT, "eos_token": DOCUMENT,
        }  # fmt: skip
        (target / f"{Path(TOKENIZER).stem}_config.json").write_text(json.dumps(about), encoding="utf-8")
    return count


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def settings(folder: Path) -> None:
    """Print the section [model] for the Hugging Face model in FOLDER."""
    click.echo("[model]")
    for key, value in settings_of(json.loads((folder / CONFIG).read_text(encoding="utf-8"))).items():
        click.echo(f"{key} = {json.dumps(value)}")


def run(command: Callable[[], object] = main) -> None:
    """Entry point: errors that the user can fix are one sentence."""
    try:
        command()
    except (ConfigError, CheckpointError, OSError, KeyError) as error:
        click.echo(f"trainer.huggingface: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    run()
