"""Checkpoints of nanotron: one safetensors file for each parameter and tensor-parallel rank."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from opsd.trainer.config import ConfigError
from opsd.trainer.hf.config import fields_in, settings_of
from opsd.trainer.hf.foreign import Foreign, demand_only
from opsd.trainer.hf.kinds import packed
from opsd.trainer.tensors import Chunk, FormatError, Stored, unreadable_as_format_error

NANOTRON: Final = "model_config.json"
_FILE: Final = re.compile(r"model_(.+?)(?:_pp-rank-\d+-of-\d+_tp-rank-(\d+)-of-(\d+))?\.safetensors")
_ONLY: Final = {"rope_scaling": None, "sliding_window_size": None, "flex_attention_mask": None, "moe_config": None}
_DROPPED: Final = (
    *_ONLY, "is_llama_config", "is_qwen2_config", "rope_interleaved", "no_rope_layer", "z_loss_enabled",
    "z_loss_coefficient", "_attn_implementation", "_fused_rotary_emb", "_fused_rms_norm", "_use_qkv_packed",
    "_use_doc_masking",
)  # fmt: skip


def nanotron(folder: Path) -> Foreign:
    """The checkpoint in ``folder``. Raises ConfigError or FormatError."""
    given = fields_in(path := folder / NANOTRON)
    if not (given.get("is_llama_config") or given.get("is_qwen2_config")):
        raise ConfigError(f"{path} is not of nanotron's Llama or Qwen 2, the models that can be read")
    demand_only(path, given, _ONLY)
    config = {name: value for name, value in given.items() if name not in _DROPPED}
    config["model_type"] = "llama"
    if every := given.get("no_rope_layer"):
        config |= {"model_type": "smollm3", "no_rope_layer_interval": every}
    elif given.get("is_qwen2_config") and config.pop("attention_bias", False):
        config |= {"model_type": "qwen2", "use_sliding_window": False}
    # Files of releases without the field are of those that rotate neighbours, by 10,000.
    config.setdefault("rope_theta", 10_000.0)
    return Foreign(
        folder, config, _tensors(folder / "model"), _names(config), "model.decoder.{}.pp_block.",
        interleaved=given.get("rope_interleaved", True),
    )  # fmt: skip


def _names(config: dict[str, Any]) -> dict[str, Any]:
    model = settings_of(config)
    heads, kv_heads, ffn, channels = model.heads, model.kv_heads, model.ffn, model.head_channels
    queries = [("attention.query", heads * channels)]
    keys = [(name, kv_heads * channels) for name in ("attention.key", "attention.value")]
    return {
        "embedding": "model.token_position_embeddings.pp_block.token_embedding",
        "norm": "model.final_layer_norm.pp_block", "head": "model.lm_head.pp_block",
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        **packed("attn.qkv_proj", [*queries, *keys]), "attention.output": "attn.o_proj",
        **packed("mlp.gate_up_proj", [("ffn.gate", ffn), ("ffn.up", ffn)]), "ffn.down": "mlp.down_proj",
    }  # fmt: skip


def _tensors(root: Path) -> dict[str, Stored]:
    """The parameters in the files below ``root``. Raises FormatError if a rank's is missing."""
    ranks: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    found: dict[str, Stored] = {}
    for path in sorted(root.rglob("*.safetensors")):
        if (match := _FILE.fullmatch(path.name)) is None:
            raise FormatError(f"{path} has no name that nanotron gives to a parameter")
        name = ".".join((*path.relative_to(root).parent.parts, match[1]))
        with unreadable_as_format_error(path):
            chunks, shape = _chunks(path)
        if found.setdefault(name, Stored(name, shape)).shape != shape:
            raise FormatError(f"{path} is a part of another {name} than the files beside it")
        found[name].chunks.extend(chunks)
        ranks[name].add(int(match[2] or 0))
        sizes[name] = int(match[3] or 1)
    for name, size in sizes.items():
        if missing := set(range(size)) - ranks[name]:
            raise FormatError(f"{root} has no part of tensor-parallel rank {min(missing)} of {size} of {name}")
    return found


def _chunks(path: Path) -> tuple[list[Chunk], tuple[int, ...]]:
    """The parts of a parameter in a file, and the shape of the parameter."""
    with safe_open(path, framework="pt") as file:
        local = tuple(file.get_slice("data").get_shape())
        about = file.metadata() or {}
    if "unsharded_shape" not in about:
        return [Chunk((0,) * len(local), local, partial(_part, path, ()))], local
    shape = tuple(int(size) for size in about["unsharded_shape"].strip("()").split(",") if size.strip())
    chunks = []
    for pair in about["local_global_slices_pairs"].split(";"):
        here, there = ([_slice(text) for text in part.split("|")] for part in pair.split("#"))
        offset = tuple(each.start or 0 for each in there)
        size = tuple(len(range(n)[each]) for each, n in zip(here, local, strict=True))
        chunks.append(Chunk(offset, size, partial(_part, path, tuple(here))))
    return chunks, shape


def _slice(text: str) -> slice:
    return slice(*(None if number == "None" else int(number) for number in text.split(",")))


def _part(path: Path, slices: tuple[slice, ...]) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor("data")
    return tensor[slices]
