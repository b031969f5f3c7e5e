"""Checkpoints of other programs with the weights of a model of transformers, laid out as their sources lay them out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

Weights = Mapping[str, torch.Tensor]


def interleaved(weight: torch.Tensor, channels: int) -> torch.Tensor:
    """Rows of heads of so many channels whose halves are rotated, in the order for rotated neighbours."""
    heads = [torch.stack(head.chunk(2), dim=1).flatten(0, 1) for head in weight.split(channels)]
    return torch.cat(heads)


def save_titan(model: Any, folder: Path) -> None:
    """As torchtitan's checkpointer: a distributed checkpoint of the model beside other state."""
    config, weights = model.config, model.state_dict()
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = config.model_type == "llama"
    state: dict[str, Any] = {
        "tok_embeddings.weight": weights["model.embed_tokens.weight"], "norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }  # fmt: skip
    names = {
        "attention.qkv_linear.wq": "self_attn.q_proj", "attention.qkv_linear.wk": "self_attn.k_proj",
        "attention.qkv_linear.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
    }  # fmt: skip
    for layer in range(config.num_hidden_layers):
        for name, theirs in names.items():
            if (weight := weights.get(f"model.layers.{layer}.{theirs}.weight")) is None:
                continue
            if turned and name[-2:] in ("wq", "wk"):
                weight = interleaved(weight, channels)
            state[f"layers.{layer}.{name}.weight"] = weight
    state |= {"optimizer": {"state": {"norm.weight": {"exp_avg": torch.ones(3)}}}, "train_state": {"step": 3}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def save_nanotron(model: Any, folder: Path, tensor: int, fields: Mapping[str, Any]) -> None:
    """As nanotron's ``save_weights`` on ``tensor`` ranks, with the ``fields`` that transformers has not."""
    config, weights = model.config, model.state_dict()
    channels = config.hidden_size // config.num_attention_heads
    turn = interleaved if fields["rope_interleaved"] else lambda weight, _: weight

    def save(name: str, parts: list[torch.Tensor], along: int | None = 0) -> None:
        *parents, last = name.split(".")
        place = folder.joinpath("model", *parents)
        place.mkdir(parents=True, exist_ok=True)
        if along is None:
            save_file({"data": parts[0].contiguous()}, place / f"model_{last}.safetensors")
            return
        others = "|".join(["None,None,None"] * (parts[0].dim() - 1 - along))
        for rank in range(tensor):
            here = there = 0
            pairs = []
            for part in parts:
                size = part.shape[along] // tensor
                ends = [f"{here},{here + size},None", f"{there + rank * size},{there + (rank + 1) * size},None"]
                before = ["None,None,None"] * along
                pairs.append("#".join("|".join([*before, end, *([others] if others else [])]) for end in ends))
                here, there = here + size, there + part.shape[along]
            local = torch.cat([part.chunk(tensor, along)[rank] for part in parts], along)
            shape = list(local.shape)
            shape[along] *= tensor
            about = {
                "version": "1.4", "local_global_slices_pairs": ";".join(pairs), "unsharded_shape": str(tuple(shape)),
            }  # fmt: skip
            file = place / f"model_{last}_pp-rank-0-of-1_tp-rank-{rank}-of-{tensor}.safetensors"
            save_file({"data": local.contiguous()}, file, metadata=about)

    save(
        "model.token_position_embeddings.pp_block.token_embedding.weight", [weights["model.embed_tokens.weight"]]
    )  # fmt: skip
    save("model.final_layer_norm.pp_block.weight", [weights["model.norm.weight"]], None)
    if not config.tie_word_embeddings:
        save("model.lm_head.pp_block.weight", [weights["lm_head.weight"]])
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"model.decoder.{layer}.pp_block", f"model.layers.{layer}"
        for end in ("weight", "bias"):
            if f"{theirs}.self_attn.q_proj.{end}" in weights:
                q, k, v = (weights[f"{theirs}.self_attn.{part}_proj.{end}"] for part in "qkv")
                save(f"{ours}.attn.qkv_proj.{end}", [turn(q, channels), turn(k, channels), v])
        save(f"{ours}.attn.o_proj.weight", [weights[f"{theirs}.self_attn.o_proj.weight"]], 1)
        save(
            f"{ours}.mlp.gate_up_proj.weight", [weights[f"{theirs}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        )
        save(f"{ours}.mlp.down_proj.weight", [weights[f"{theirs}.mlp.down_proj.weight"]], 1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            save(f"{ours}.{norm}.weight", [weights[f"{theirs}.{norm}.weight"]], None)
    shape = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
        "vocab_size", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "max_position_embeddings",
    )  # fmt: skip
    rope = {"rope_theta": config.rope_parameters["rope_theta"], "rope_scaling": None}
    named = {name: getattr(config, name) for name in shape} | rope | {"moe_config": None, "z_loss_enabled": False}
    (folder / "model_config.json").write_text(json.dumps(named | fields))


class Backend:
    """Stands for the enumerations and random states in Megatron-LM's files, of which nothing may be built."""

    def __reduce__(self) -> Any:
        return print, ("built",)


def save_megatron(model: Any, root: Path, tensor: int, pipeline: int, fused: bool = False, **arguments: object) -> Path:
    """As Megatron-LM's ``--ckpt-format torch`` on so many ranks; with Transformer Engine's names if ``fused``."""
    config, weights = model.config, model.state_dict()
    args = argparse.Namespace(
        swiglu=True, normalization="RMSNorm", position_embedding_type="rope", rotary_percent=1.0,
        rotary_interleaved=False, rotary_base=int(config.rope_parameters["rope_theta"]), use_rope_scaling=False,
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads, num_query_groups=config.num_key_value_heads,
        group_query_attention=True, padded_vocab_size=config.vocab_size, norm_epsilon=config.rms_norm_eps,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings, add_bias_linear=False, add_qkv_bias=False,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings, num_experts=None, qk_layernorm=False,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, params_dtype=torch.float32,
        attention_backend=Backend(), virtual_pipeline_model_parallel_size=None,
    )  # fmt: skip
    vars(args).update(arguments)
    each, folder = config.num_hidden_layers // pipeline, root / "iter_0000007"
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    for stage in range(pipeline):
        for rank in range(tensor):
            state = _stage(config, weights, range(stage * each, (stage + 1) * each), rank, tensor, args.kv_channels)
            if fused:
                state = _fused(state)
            if stage == 0:
                state["embedding.word_embeddings.weight"] = _rows(weights["model.embed_tokens.weight"], rank, tensor)
            if stage == pipeline - 1:
                state["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
                if not config.tie_word_embeddings or pipeline > 1:
                    state["output_layer.weight"] = _rows(weights["lm_head.weight"], rank, tensor)
            place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
            place.mkdir(parents=True)
            content = {
                "args": args, "checkpoint_version": 3.0, "iteration": 7, "model": state, "rng_state": [Backend()],
            }  # fmt: skip
            torch.save(content, place / "model_optim_rng.pt")
    return folder


def _rows(weight: torch.Tensor, rank: int, tensor: int) -> torch.Tensor:
    return weight.chunk(tensor)[rank].clone()


def _stage(config: Any, weights: Weights, layers: range, rank: int, tensor: int, channels: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    groups = config.num_key_value_heads
    for number, layer in enumerate(layers):
        ours, theirs = f"decoder.layers.{number}", f"model.layers.{layer}"
        for end in ("weight", "bias"):
            if f"{theirs}.self_attn.q_proj.{end}" in weights:
                heads = [weights[f"{theirs}.self_attn.{part}_proj.{end}"].chunk(groups) for part in "qkv"]
                grouped = torch.cat([torch.cat(group) for group in zip(*heads, strict=True)])
                state[f"{ours}.self_attention.linear_qkv.{end}"] = _rows(grouped, rank, tensor)
            if f"{theirs}.mlp.gate_proj.{end}" in weights:
                both = [_rows(weights[f"{theirs}.mlp.{part}_proj.{end}"], rank, tensor) for part in ("gate", "up")]
                state[f"{ours}.mlp.linear_fc1.{end}"] = torch.cat(both)
        for name, end in (("self_attention.linear_proj", "self_attn.o_proj"), ("mlp.linear_fc2", "mlp.down_proj")):
            state[f"{ours}.{name}.weight"] = weights[f"{theirs}.{end}.weight"].chunk(tensor, 1)[rank].clone()
            state[f"{ours}.{name}._extra_state"] = None
            if f"{theirs}.{end}.bias" in weights:
                state[f"{ours}.{name}.bias"] = weights[f"{theirs}.{end}.bias"]
        for part in "qk":
            if f"{theirs}.self_attn.{part}_norm.weight" in weights:
                norm = weights[f"{theirs}.self_attn.{part}_norm.weight"]
                state[f"{ours}.self_attention.{part}_layernorm.weight"] = norm
        state[f"{ours}.input_layernorm.weight"] = weights[f"{theirs}.input_layernorm.weight"]
        state[f"{ours}.pre_mlp_layernorm.weight"] = weights[f"{theirs}.post_attention_layernorm.weight"]
    return state


def _fused(state: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
        ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
    }
    found = {}
    for name, value in state.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        found[name] = value
    return found
