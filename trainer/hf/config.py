"""A ``config.json`` of Hugging Face as our settings, and back.

A field is either translated, or has the one value that this trainer computes, or changes nothing that it computes. Any
other one is refused by name: with a wrong configuration, weights are read without an error and train from garbage.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from opsd.trainer.config import ConfigError
from opsd.trainer.hf.architectures import ARCHITECTURES, SHAPE, Architecture, architecture_of
from opsd.trainer.hf.blocks import (
    CHUNKS,
    config_of_dual_chunks,
    config_of_latents,
    settings_of_dual_chunks,
    settings_of_latents,
    with_dual_chunks,
)
from opsd.trainer.hf.kinds import Fields
from opsd.trainer.hf.rope import config_of_rope, settings_of_rope
from opsd.trainer.model_settings import STATE_PRODUCTS, LayerKind, ModelSettings, model_problem

_ACTIVATIONS: Final = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip
_NO_CHANGE: Final = frozenset({
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings", "_name_or_path", "pretraining_tp",
    "id2label", "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states", "torchscript",
    "chunk_size_feed_forward", "tokenizer_class", "prefix", "finetuning_task", "task_specific_params",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "cache_implementation",
    "use_return_dict", "sep_token_id", "cls_token_id", "decoder_start_token_id", "is_llama_config",
    "max_window_layers", "transformers.js_config", "auto_map", "num_nextn_predict_layers", "num_mtp_layers",
    "no_rope_layer_interval", "_sliding_window_pattern", "sliding_window_pattern", "unsloth_version", "unsloth_fixed",
    "attn_rotary_emb",
})  # fmt: skip
"""Of the library, of files, of generation, or defaults of other fields that are translated."""
_ONE_VALUE: Final[Fields] = {
    "attention_dropout": 0, "hidden_dropout": 0, "resid_pdrop": 0, "embd_pdrop": 0, "is_encoder_decoder": False,
    "is_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False, "partial_rotary_factor": 1,
    "use_bidirectional_attention": False, "use_bfloat16": False, "rope_interleaved": False, "use_mrope": False,
    "router_jitter_noise": 0, "decoder_sparse_step": 1, "use_sliding_window": False,
}  # fmt: skip


_MOST_LAYERS: Final = 10_000
_FEW: Final = 5
"""Fields that a refusal names at most."""


def fields_in(path: Path) -> dict[str, Any]:
    """The JSON object in the file ``path``. Raises ConfigError."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} is not the configuration of a model")
    return fields


def settings_of(config: Fields) -> ModelSettings:
    """The settings that compute what ``config.json`` says. Raises ConfigError if this trainer cannot."""
    try:
        settings = _settings_of(config)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"config.json has a field of another type, or a number, that cannot be: {error}") from error
    if problem := model_problem(settings):
        raise ConfigError(f"config.json cannot be used: {problem}")
    return settings


def _settings_of(config: Fields) -> ModelSettings:
    try:
        architecture = architecture_of(config)
    except ConfigError as error:
        raise ConfigError(f"{error}{_of_its_own(config)}") from error
    for name, value in config.items():
        _demand_known(architecture, name, value)
    fields = {**architecture.defaults, **config}
    try:
        shape = {ours: fields[theirs] for ours, theirs in SHAPE.items()}
    except KeyError as error:
        raise ConfigError(f"config.json lacks {error.args[0]}") from error
    if not isinstance(shape["layers"], int) or not 0 < shape["layers"] <= _MOST_LAYERS:
        raise ConfigError(f"config.json has num_hidden_layers {shape['layers']!r}; 1 to {_MOST_LAYERS:,} can be used")
    kinds = architecture.kinds(fields)
    if len(kinds) < shape["layers"]:
        raise ConfigError(f"config.json says of {len(kinds)} layers what they are, and has {shape['layers']}")
    dual = fields.get(CHUNKS)
    kinds = with_dual_chunks(kinds) if dual else kinds
    flags = {ours: bool(fields.get(theirs)) for theirs, names in architecture.flags.items() for ours in names}
    try:
        return ModelSettings(**{
            **shape, **flags, **architecture.fixed, **_pattern(kinds[: shape["layers"]]),
            **(settings_of_dual_chunks(dual) if dual else {}),
            **(architecture.experts.settings(fields) if architecture.experts else {}),
            **_scores(architecture, fields), **settings_of_rope(architecture, fields),
            "kv_heads": shape["kv_heads"] or shape["heads"], "head_dim": fields.get("head_dim") or 0,
            **(settings_of_latents(fields) if architecture.latent else {}),
            **(architecture.states.settings(fields) if architecture.states else {}),
            "activation": _activation(architecture, fields),
            "window": _window(architecture, fields, kinds),
        })  # fmt: skip
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(
            f"config.json gives model.{wrong['loc'][0]} a value that cannot be: {wrong['msg']}"
        ) from error


def _of_its_own(config: Fields) -> str:
    """What to say of the fields that no architecture of this trainer has."""
    known = _NO_CHANGE.union(_ONE_VALUE, *(each.known for each in ARCHITECTURES))
    strange = sorted(name for name, value in config.items() if name not in known and value not in (None, [], {}))
    return f"; none of them has {', '.join(strange[:_FEW])}" if strange else ""


def _demand_known(architecture: Architecture, name: str, value: object) -> None:
    if not _finite(value) and name != "time_step_limit":
        raise ConfigError(f"config.json has {name} = {value!r}, which is no finite number")
    if name in architecture.known or name in _NO_CHANGE:
        return
    only = {**_ONE_VALUE, **architecture.only}
    if value is None or value in ([], {}) or (name in only and value == only[name]):
        return
    raise ConfigError(
        f"config.json has {name} = {value!r}, which this trainer does not compute for {architecture.kind}; if it "
        "changes nothing in the model, remove it from the file"
    )


def _finite(value: object) -> bool:
    """Whether no number in ``value`` is one of NaN and Infinity, which Python reads from JSON."""
    if isinstance(value, dict | list):
        return all(map(_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _activation(architecture: Architecture, fields: Fields) -> str:
    name = fields.get(architecture.activation) or architecture.defaults[architecture.activation]
    if name not in _ACTIVATIONS:
        raise ConfigError(f"config.json has {architecture.activation} {name!r}; {', '.join(_ACTIVATIONS)} can be used")
    return _ACTIVATIONS[name]


def _pattern(kinds: list[LayerKind]) -> dict[str, Any]:
    """The shortest settings for these kinds of layers."""
    every = next((number for number, kind in enumerate(kinds, 1) if kind == "nope"), 0)
    rotary = set(kinds) - {"nope"}
    if len(rotary) <= 1 and rotary <= {"global", "window"} and kinds == [
        "nope" if every and not number % every else next(iter(rotary), "nope") for number in range(1, len(kinds) + 1)
    ]:  # fmt: skip
        return {"nope_every": every}
    for length in range(1, len(kinds) + 1):
        if all(kind == kinds[layer % length] for layer, kind in enumerate(kinds)):
            return {"pattern": tuple(kinds[:length]), "nope_every": 0}
    raise AssertionError


def _window(architecture: Architecture, fields: Fields, kinds: list[LayerKind]) -> int:
    """The tokens of a window, 0 without one. Raises ConfigError for 0 in the file, with which none sees itself."""
    window, used = fields.get("sliding_window"), fields.get("use_sliding_window", True)
    if "sliding_window" in architecture.extra and window == 0 and used:
        raise ConfigError("config.json has sliding_window = 0; null is no window")
    return fields["sliding_window"] if any("window" in kind for kind in kinds) else 0


def _scores(architecture: Architecture, fields: Fields) -> dict[str, float]:
    """Scales and bounds of Gemma."""
    if "query_pre_attn_scalar" not in architecture.defaults:
        return {}
    return {
        "embedding_scale": math.sqrt(fields["hidden_size"]),
        "attention_scale": float(fields["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": _bound(fields, "attn_logit_softcapping"),
        "logit_softcap": _bound(fields, "final_logit_softcapping"),
    }


def _bound(fields: Fields, name: str) -> float:
    """The bound ``name``; 0 is none. Raises ConfigError for one of 0, with which transformers makes all values 0."""
    if fields.get(name) == 0:
        raise ConfigError(f"config.json has {name} = 0; null is no bound")
    return float(fields.get(name) or 0)


def config_of(model: ModelSettings, sequence: int) -> tuple[Architecture, dict[str, Any]]:
    """An architecture that computes what ``model`` does, and its ``config.json`` for sequences of ``sequence`` tokens.

    It is the first whose file is read back as the same. Raises ConfigError if there is none.
    """
    for architecture in ARCHITECTURES:
        if bool(model.kv_rank) != architecture.latent:
            continue
        if not (architecture.states.fit(model) if architecture.states else not model.has_states):
            continue
        if model.expert_layers and not architecture.experts:
            continue
        if architecture.experts and not (model.expert_layers or architecture.latent or architecture.states):
            continue
        config = _config(architecture, model, sequence)
        if _settings_of(config).architecture == model.architecture:
            return architecture, config
    raise ConfigError(
        "no architecture of Hugging Face that this trainer knows has this combination of settings in [model]"
    )


def _config(architecture: Architecture, model: ModelSettings, sequence: int) -> dict[str, Any]:
    positions = max(sequence, int(model.yarn_factor * model.yarn_positions))
    config: dict[str, Any] = {
        "architectures": [f"{architecture.name}ForCausalLM"], "model_type": architecture.kind,
        **{theirs: getattr(model, ours) for ours, theirs in SHAPE.items()}, "head_dim": model.head_channels,
        architecture.activation: {"gelu_tanh": "gelu_pytorch_tanh"}.get(model.activation, model.activation),
        "initializer_range": model.init_std, "max_position_embeddings": positions,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        **{theirs: getattr(model, names[0]) for theirs, names in architecture.flags.items()},
    }  # fmt: skip
    config |= config_of_rope(architecture, model) | (architecture.experts.config(model) if architecture.experts else {})
    if architecture.latent:
        config |= {**config_of_latents(model), **architecture.only}
        del config["head_dim"]
    if "sliding_window" in architecture.extra:
        windowed = ["window" in kind for kind in model.kinds]
        config |= {
            "sliding_window": model.window if any(windowed) else None,
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windowed],
        }  # fmt: skip
        if architecture.kind == "mistral" and len(set(windowed)) == 1:
            del config["layer_types"]
        if "use_sliding_window" in architecture.extra:
            config["use_sliding_window"] = any(windowed)
    if CHUNKS in architecture.extra:
        config |= config_of_dual_chunks(model)
    if "no_rope_layers" in architecture.extra:
        config["no_rope_layers"] = [int(not kind.startswith("nope")) for kind in model.kinds]
    if architecture.states:
        attention = [kind not in STATE_PRODUCTS for kind in model.kinds]
        config |= {**architecture.states.config(model), **architecture.only}
        if "attn_layer_indices" in architecture.extra:
            config["attn_layer_indices"] = [layer for layer, attends in enumerate(attention) if attends]
        else:
            config["layer_types"] = ["full_attention" if attends else "linear_attention" for attends in attention]
    if "query_pre_attn_scalar" in architecture.defaults:
        config |= {
            "query_pre_attn_scalar": _whole((model.attention_scale or model.head_channels**-0.5) ** -2),
            "attn_logit_softcapping": model.attention_softcap or None,
            "final_logit_softcapping": model.logit_softcap or None,
        }  # fmt: skip
    return config


def _whole(value: float) -> float:
    return round(value) if math.isclose(value, round(value), rel_tol=1e-9) else value
