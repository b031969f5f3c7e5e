"""Checkpoints of Megatron-LM in its format ``torch``: one pickle for each tensor- and pipeline-parallel rank.

A pickle is read without executing anything of it. Of its classes only ``argparse.Namespace`` is built, which has the
arguments of the run; any other object becomes an empty one.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch

from opsd.trainer.config import ConfigError
from opsd.trainer.hf.config import settings_of
from opsd.trainer.hf.foreign import Foreign, demand_only
from opsd.trainer.hf.kinds import Fields, Place, packed
from opsd.trainer.tensors import Chunk, FormatError, Stored, content_of, itself, unreadable_as_format_error

MEGATRON: Final = "mp_rank_*"
NEWEST: Final = "latest_checkpointed_iteration.txt"
_NEEDED: Final = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}
_ONLY: Final[Fields] = {
    "rotary_percent": 1.0, "rotary_seq_len_interpolation_factor": None, "apply_layernorm_1p": False,
    "num_experts": None, "multi_latent_attention": False, "window_size": None, "no_rope_freq": None,
    "softmax_type": "vanilla", "attention_output_gate": False, "mtp_num_layers": None, "is_hybrid_model": False,
    "hybrid_override_pattern": None, "experimental_attention_variant": None, "heterogeneous_layers_config_path": None,
    "apply_residual_connection_post_layernorm": False, "squared_relu": False, "quick_geglu": False,
    "virtual_pipeline_model_parallel_size": None, "fp8_param_gather": False,
}  # fmt: skip
_SHAPE: Final = {
    "num_hidden_layers": "num_layers", "hidden_size": "hidden_size", "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads", "head_dim": "kv_channels", "vocab_size": "padded_vocab_size",
    "rms_norm_eps": "norm_epsilon", "rope_theta": "rotary_base", "max_position_embeddings": "max_position_embeddings",
}  # fmt: skip
_LLAMA3: Final = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""What Megatron-LM's --use-rope-scaling computes."""
_RENAMED: Final = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Names with Transformer Engine, whose products include the norm before them."""
_ROWS: Final = re.compile(r"(?:embedding\.word_embeddings|output_layer|.*\.linear_(?:qkv|fc1))\.(?:weight|bias)")
_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.")
_COLUMNS: Final = re.compile(r".*\.linear_(?:proj|fc2)\.weight")


def in_newest(root: Path) -> Path:
    """The folder of the newest checkpoint in ``root``, which a file names. Raises FormatError."""
    name = (root / NEWEST).read_text(encoding="utf-8", errors="replace").strip()
    folder = root / (f"iter_{int(name):07d}" if name.isdecimal() else "release")
    if not folder.is_dir():
        raise FormatError(f"{root / NEWEST} names {name!r}, and {folder} does not exist")
    return folder


def megatron(folder: Path) -> Foreign:
    """The checkpoint in ``folder``. Raises ConfigError or FormatError."""
    first = _read(next(iter(sorted(folder.glob(MEGATRON)))))
    args = vars(first["args"])
    config, tensor, pipeline = _config(folder, args), *_layout(folder, args)
    names_of_ours = _names(config, tensor)
    stages: list[list[dict[str, torch.Tensor]]] = []
    seen: dict[tuple[float, ...], str] = {}
    for stage in range(pipeline):
        names = [f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else "") for rank in range(tensor)]
        ranks = []
        for name in names:
            content = _read(folder / name)
            if content.get("iteration") != first.get("iteration"):
                raise FormatError(f"{folder / name} is of another iteration than the ranks beside it")
            ranks.append(_model(content["model"]))
            if (other := seen.setdefault(_sample(ranks[-1]), name)) != name:
                raise FormatError(f"{folder / name} has the weights of {other}, of which it seems to be a copy")
        stages.append(ranks)
    return Foreign(
        folder, config, _joined(folder, stages), names_of_ours, "decoder.layers.{}.",
        interleaved=bool(args.get("rotary_interleaved")),
    )  # fmt: skip


def _read(folder: Path) -> dict[str, Any]:
    """What the rank has saved in ``folder``. Raises FormatError unless it is a model with its arguments."""
    paths = [path for name in ("model_optim_rng.pt", "model_rng.pt") if (path := folder / name).is_file()]
    if not paths:
        raise FormatError(f"{folder} has no model_optim_rng.pt")
    with unreadable_as_format_error(paths[0]):
        content = content_of(paths[0], argparse.Namespace)
    if not isinstance(content, dict) or not isinstance(content.get("args"), argparse.Namespace):
        raise FormatError(f"{paths[0]} does not have the arguments of Megatron-LM (args)")
    if not isinstance(content.get("model"), Mapping):
        raise FormatError(f"{paths[0]} has no model, or one in several parts (--num-layers-per-virtual-pipeline-stage)")
    return content


def _layout(folder: Path, args: Fields) -> tuple[int, int]:
    """Tensor- and pipeline-parallel ranks. Raises FormatError unless there is a folder for each."""
    sizes = [args.get(f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline")]
    there = sum(1 for _ in folder.glob(MEGATRON))
    if there != sizes[0] * sizes[1]:
        raise FormatError(
            f"{folder} has {there} folders {MEGATRON}, and its arguments say {sizes[0]} tensor-parallel x {sizes[1]} "
            "pipeline-parallel ranks"
        )
    return sizes[0], sizes[1]


def _config(folder: Path, args: Fields) -> dict[str, Any]:
    args = {"norm_epsilon": args.get("layernorm_epsilon"), **args}
    demand_only(folder, {**dict.fromkeys(_NEEDED), **args}, _NEEDED)
    demand_only(folder, args, _ONLY)
    try:
        config = {theirs: args[ours] for theirs, ours in _SHAPE.items()}
    except KeyError as error:
        raise ConfigError(f"the arguments in {folder} lack {error.args[0]}") from error
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    biases, kind = bool(args.get("add_bias_linear")), "llama"
    if args.get("qk_layernorm"):
        kind = "qwen3"
    elif args.get("add_qkv_bias") and not biases:
        kind = "qwen2"
    config |= {
        "model_type": kind, "num_key_value_heads": groups or args["num_attention_heads"],
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights"),
    }  # fmt: skip
    config |= {"attention_bias": biases, "mlp_bias": biases} if kind == "llama" else {}
    if args.get("use_rope_scaling"):
        config["rope_scaling"] = {**_LLAMA3, "factor": args.get("rope_scaling_factor", 8.0)}
    return config


def _names(config: Fields, tensor: int) -> dict[str, str | Place]:
    model = settings_of(config)
    groups, channels, ffn = model.kv_heads, model.head_channels, model.ffn
    queries = model.heads // groups * channels
    of_group = [("attention.query", queries), ("attention.key", channels), ("attention.value", channels)]
    return {
        "embedding": "embedding.word_embeddings", "norm": "decoder.final_layernorm", "head": "output_layer",
        "attention_norm": "input_layernorm", "ffn_norm": "pre_mlp_layernorm",
        "attention.output": "self_attention.linear_proj", "ffn.down": "mlp.linear_fc2",
        "attention.query_norm": "self_attention.q_layernorm", "attention.key_norm": "self_attention.k_layernorm",
        **packed("self_attention.linear_qkv", of_group, groups),
        **packed("mlp.linear_fc1", [("ffn.gate", ffn // tensor), ("ffn.up", ffn // tensor)], tensor),
    }  # fmt: skip


def _sample(state: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
    """Some weights of a rank, which no other rank has."""
    parts = (each.flatten()[:64].tolist() for name, each in state.items() if _ROWS.fullmatch(name))
    return tuple(chain.from_iterable(parts))


def _model(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a rank's model, without the states of Transformer Engine."""
    found = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
            for new, old in _RENAMED.items():
                name = name.replace(new, old)  # noqa: PLW2901
            found[name] = value
    return found


def _joined(folder: Path, stages: list[list[dict[str, torch.Tensor]]]) -> dict[str, Stored]:
    """The tensors of all ranks; layers of a stage follow those of the stages before."""
    joined, before = {}, 0
    for ranks in stages:
        numbers: set[int] = set()
        parts: dict[str, list[torch.Tensor]] = defaultdict(list)
        for rank in ranks:
            for name, tensor in rank.items():
                if match := _LAYER.match(name):
                    numbers.add(int(match[1]))
                    name = f"decoder.layers.{int(match[1]) + before}.{name[match.end() :]}"  # noqa: PLW2901
                parts[name].append(tensor)
        for name, tensors in parts.items():
            if len(tensors) != len(ranks):
                raise FormatError(f"{folder} has {name} of {len(tensors)} of {len(ranks)} tensor-parallel ranks")
            joined[name] = _join(folder, name, tensors)
        before += len(numbers)
    return joined


def _join(folder: Path, name: str, tensors: list[torch.Tensor]) -> Stored:
    first = tensors[0]
    along = 0 if _ROWS.fullmatch(name) else 1 if _COLUMNS.fullmatch(name) else None
    if any(tensor.shape != first.shape for tensor in tensors):
        raise FormatError(f"{folder} has {name} of unlike shapes on its tensor-parallel ranks")
    if along is None:
        if not all(torch.equal(tensor, first) for tensor in tensors):
            raise FormatError(f"{folder} has {name} with unlike values on its tensor-parallel ranks")
        tensors = tensors[:1]
    shape, chunks = list(first.shape), []
    for rank, tensor in enumerate(tensors):
        offset = [0] * len(shape)
        if along is not None:
            offset[along] = rank * shape[along]
        chunks.append(Chunk(tuple(offset), tuple(shape), partial(itself, tensor)))
    if along is not None:
        shape[along] *= len(tensors)
    return Stored(name, tuple(shape), chunks)
