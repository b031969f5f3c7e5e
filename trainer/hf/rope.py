"""Rotary positions in a ``config.json``, in the form of transformers 5 (``rope_parameters``) or the earlier one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from opsd.trainer.config import ConfigError
from opsd.trainer.hf.architectures import Architecture
from opsd.trainer.hf.kinds import Fields
from opsd.trainer.model_settings import ModelSettings, yarn_attention

_ROPE_DEFAULTS: Final = (("partial_rotary_factor", 1.0), ("factor", 1.0))
_YARN: Final = {
    "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim", "truncate", "finetuned",
}  # fmt: skip
_LLAMA3: Final = {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}


def settings_of_rope(architecture: Architecture, fields: Fields) -> dict[str, Any]:
    """The settings for the rotary positions of ``fields``. Raises ConfigError for those that this trainer lacks."""
    given, scaling = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
    by_layer = {name: given[name] for name in ("full_attention", "sliding_attention") if name in given}
    if "rope_local_base_freq" in architecture.defaults and ((given and not by_layer) or "type" in scaling):
        raise ConfigError(
            f"config.json scales positions in a form that transformers does not read for {architecture.kind}; give "
            "rope_parameters by kind of layer, or rope_type in rope_scaling"
        )
    rope = {**by_layer.get("full_attention", {}), **scaling} if by_layer else {**(scaling or given)}
    theta = float(rope.pop("rope_theta", None) or fields["rope_theta"])
    found: dict[str, Any] = {"rope_theta": theta}
    if architecture.partial:
        channels = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        found["rope_dim"] = int(channels * _rotated(architecture, rope, fields))
    found |= _scaling(rope, fields)
    if architecture.latent and "yarn_factor" in found:
        found["yarn_scores"] = float(rope.get("mscale_all_dim") or 0)
    if "rope_local_base_freq" in architecture.defaults:
        local = {"rope_theta": fields["rope_local_base_freq"] or theta, **by_layer.get("sliding_attention", {})}
        found["window_theta"] = float(local.pop("rope_theta"))
        if _scaling(local, fields):
            raise ConfigError("config.json scales the positions of layers with a window, which this trainer does not")
    elif by_layer:
        raise ConfigError(f"config.json has rope_parameters by kind of layer, which {architecture.kind} has not")
    return found


def _rotated(architecture: Architecture, rope: dict[str, Any], fields: Fields) -> float:
    """The share of a head's channels that have positions, which is taken out of ``rope``."""
    default = architecture.partial
    share = fields.get("partial_rotary_factor", default)
    if "partial_rotary_factor" not in rope and architecture.partial_in_rope and share != default:
        raise ConfigError(
            f"config.json has partial_rotary_factor = {share!r}, in place of which transformers takes {default} for "
            f"{architecture.kind}; give it in rope_parameters, or leave it out"
        )
    share = rope.pop("partial_rotary_factor", share)
    if not share:
        raise ConfigError(f"config.json has partial_rotary_factor = {share!r}; without it {default} is used")
    return float(share)


def _scaling(rope: dict[str, Any], fields: Fields) -> dict[str, Any]:
    kind, legacy = rope.pop("rope_type", None), rope.pop("type", None)
    kind = kind or legacy or "default"
    known = {"default": set(), "linear": {"factor"}, "yarn": _YARN, "llama3": _LLAMA3}.get(kind)
    if known is None:
        raise ConfigError(f"config.json has rope_type {kind!r}; default, linear, yarn and llama3 can be used")
    for name, value in rope.items():
        if name not in known and value is not None and (name, value) not in _ROPE_DEFAULTS:
            raise ConfigError(
                f"config.json has {name} = {value!r} for rope_type {kind}, which this trainer does not use"
            )
    try:
        return _SCALINGS[kind](rope, fields)
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]} for rope_type {kind}") from error


def _yarn(rope: Fields, fields: Fields) -> dict[str, Any]:
    original = rope.get("original_max_position_embeddings") or fields["max_position_embeddings"]
    factor = float(rope.get("factor") or fields["max_position_embeddings"] / original)
    attention, scale, all_dim = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if attention is None and scale and all_dim and factor > 1:
        attention = (0.1 * scale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
    if factor == 1 and attention not in (None, 1):
        raise ConfigError(
            f"config.json has attention_factor = {attention} with a factor of 1, which scales nothing here"
        )
    return {
        "yarn_factor": factor, "yarn_positions": original,
        "yarn_turns": (float(rope.get("beta_slow") or 1), float(rope.get("beta_fast") or 32)),
        "yarn_whole_channels": rope.get("truncate", True),
        "yarn_attention": 0.0 if attention in (None, yarn_attention(factor)) else float(attention),
    }  # fmt: skip


def _llama3(rope: Fields, _: Fields) -> dict[str, Any]:
    return {
        "llama3_factor": float(rope["factor"]), "llama3_positions": rope["original_max_position_embeddings"],
        "llama3_turns": (float(rope["low_freq_factor"]), float(rope["high_freq_factor"])),
    }  # fmt: skip


_SCALINGS: Final[Mapping[str, Callable[[Fields, Fields], dict[str, Any]]]] = {
    "default": lambda rope, _: {},
    "linear": lambda rope, _: {"rope_factor": float(rope["factor"])},
    "yarn": _yarn,
    "llama3": _llama3,
}


def config_of_rope(architecture: Architecture, model: ModelSettings) -> dict[str, Any]:
    """The fields of ``config.json`` for the rotary positions of ``model``."""
    scaling = _scaling_of(model)
    if architecture.latent and model.yarn_factor > 1:
        scaling |= {"mscale": _mscale(model), "mscale_all_dim": model.yarn_scores}
    if architecture.partial:
        scaling["partial_rotary_factor"] = model.rotary_channels / model.head_channels
    rope = {"rope_theta": model.rope_theta, **scaling}
    if "rope_local_base_freq" in architecture.defaults:
        local = {"rope_type": "default", "rope_theta": model.window_theta or model.rope_theta}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    legacy = None if scaling["rope_type"] == "default" or architecture.partial else scaling
    return {"rope_parameters": rope, "rope_theta": model.rope_theta, "rope_scaling": legacy}


def _mscale(model: ModelSettings) -> float:
    """The factor of queries and keys as DeepSeek writes it, which other programs than transformers read."""
    factor = model.yarn_attention or yarn_attention(model.yarn_factor)
    scale = factor * yarn_attention(model.yarn_factor, model.yarn_scores)
    return round((scale - 1) / (0.1 * math.log(model.yarn_factor)), 9)


def _scaling_of(model: ModelSettings) -> dict[str, Any]:
    if model.yarn_factor > 1:
        slow, fast = model.yarn_turns
        return {
            "rope_type": "yarn", "factor": model.yarn_factor, "original_max_position_embeddings": model.yarn_positions,
            "beta_fast": fast, "beta_slow": slow, "truncate": model.yarn_whole_channels,
            "attention_factor": model.yarn_attention or yarn_attention(model.yarn_factor),
        }  # fmt: skip
    if model.llama3_factor > 1:
        low, high = model.llama3_turns
        return {
            "rope_type": "llama3", "factor": model.llama3_factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": model.llama3_positions,
        }  # fmt: skip
    if model.rope_factor > 1:
        return {"rope_type": "linear", "factor": model.rope_factor}
    return {"rope_type": "default"}
