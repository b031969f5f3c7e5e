"""Layers with a state in files of Hugging Face: fields of ``config.json``, places of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from opsd.trainer.config import ConfigError
from opsd.trainer.hf.places import Place, packed
from opsd.trainer.model_settings import STATE_PRODUCTS, LayerKind, ModelSettings

_NO_LIMIT: Final = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])


@dataclass(frozen=True, slots=True)
class StateFields:
    """How an architecture stores layers of ``kind``: its ``fields`` by our setting, and the places of its weights.

    The weights are in ``block`` of their layer.
    """

    kind: LayerKind
    fields: Mapping[str, str]
    block: str
    parts: Callable[[ModelSettings], Mapping[str, Place]]

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings for ``config``. Raises ConfigError for what this trainer does not compute."""
        if config["hidden_act"] not in ("silu", "swish"):
            raise ConfigError(
                f"config.json has hidden_act {config['hidden_act']!r}, which transformers also applies to the "
                "convolutions of layers with a state; this trainer computes silu there"
            )
        found = {ours: config[theirs] for ours, theirs in self.fields.items()}
        if self.kind == "mamba":
            if found["state_heads"] * found["state_value_dim"] != config["mamba_expand"] * config["hidden_size"]:
                raise ConfigError("config.json has mamba_n_heads x mamba_d_head unlike mamba_expand x hidden_size")
            if (limit := config.get("time_step_limit")) not in _NO_LIMIT:
                raise ConfigError(f"config.json has time_step_limit = {limit}, which this trainer does not compute")
        return found

    def fit(self, model: ModelSettings) -> bool:
        """Whether the layers of ``model`` with a state can be stored so."""
        kinds = {kind for kind in model.kinds if kind in STATE_PRODUCTS}
        return (
            kinds == {self.kind}
            and model.activation == "silu"
            and not (self.kind == "mamba" and model.state_value_width % model.width)
        )

    def config(self, model: ModelSettings) -> dict[str, Any]:
        """The fields for ``model``."""
        values = model.model_dump() | {"state_key_heads": model.state_key_heads or model.state_heads}
        config = {theirs: values[ours] for ours, theirs in self.fields.items()}
        if self.kind == "mamba":
            config["mamba_expand"] = model.state_value_width // model.width
        return config

    def place(self, name: str, model: ModelSettings) -> Place:
        """The place of our parameter ``name`` within the layer."""
        part, _, end = name.rpartition(".")
        place = self.parts(model).get(part if part and end in ("weight", "bias") else name, Place(""))
        plain = {"output.weight": "out_proj.weight", "log_rate": "A_log", "step_bias": "dt_bias", "skip": "D"}
        where = f"{place.name}.{end}" if place.name else plain.get(name, name)
        return Place(f"{self.block}.{where}", place.groups, place.begin, place.end, place.of, place.channels)


def _mamba_parts(model: ModelSettings) -> dict[str, Place]:
    keys, values = model.state_key_width, model.state_value_width
    order = [("value", values), ("key", keys), ("query", keys)]
    convolved = [(f"{name}_conv", rows) for name, rows in order]
    projected = [("gate", values), *order, ("step", model.state_heads)]
    return packed("in_proj", projected) | packed("conv1d", convolved, channels=True)


def _delta_parts(model: ModelSettings) -> dict[str, Place]:
    shared, heads = model.state_shared_by, model.state_heads // model.state_shared_by
    values = shared * model.state_value_dim
    keys = [("query", model.state_key_dim), ("key", model.state_key_dim)]
    order = [*keys, ("value", values)]
    convolved = [(f"{name}_conv", rows * heads) for name, rows in order]
    return {
        **packed("in_proj_qkvz", [*order, ("gate", values)], heads),
        **packed("in_proj_ba", [("write", shared), ("step", shared)], heads),
        **packed("conv1d", convolved, channels=True),
    }


MAMBA: Final = StateFields(
    "mamba",
    {
        "state_heads": "mamba_n_heads", "state_key_heads": "mamba_n_groups", "state_key_dim": "mamba_d_state",
        "state_value_dim": "mamba_d_head", "state_conv": "mamba_d_conv", "state_conv_bias": "mamba_conv_bias",
    },
    "mamba", _mamba_parts,
)  # fmt: skip
DELTA: Final = StateFields(
    "delta",
    {
        "state_heads": "linear_num_value_heads", "state_key_heads": "linear_num_key_heads",
        "state_key_dim": "linear_key_head_dim", "state_value_dim": "linear_value_head_dim",
        "state_conv": "linear_conv_kernel_dim",
    },
    "linear_attn", _delta_parts,
)  # fmt: skip
