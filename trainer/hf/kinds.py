"""Kinds of layers in the files of Hugging Face, and where these name settings.

The place of a parameter of ours in files of Hugging Face: a tensor, or some rows of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opsd.trainer.config import ConfigError
from opsd.trainer.model_settings import LayerKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Place:
    """The tensor ``name``; or of it, in ``groups`` equal groups of rows, those from ``begin`` to ``end`` out of ``of``.

    ``channels`` says that the rows are those of a convolution of single channels, which has another dimension.
    """

    name: str
    groups: int = 1
    begin: int = 0
    end: int = 0
    of: int = 0
    channels: bool = False

    @property
    def whole(self) -> bool:
        """Whether the parameter is the tensor."""
        return not self.of

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor, for a parameter of ``shape``."""
        rows = self.groups * self.of
        return shape if self.whole else (rows, *([1] if self.channels and len(shape) > 1 else []), *shape[1:])

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The parameter's rows of ``tensor``, sharing its memory: [groups, rows of a group, ..]."""
        if self.channels and tensor.dim() > 1:
            tensor = tensor.squeeze(1)
        return tensor.view(self.groups, self.of, *tensor.shape[1:])[:, self.begin : self.end]


def packed(name: str, parts: Iterable[tuple[str, int]], groups: int = 1, *, channels: bool = False) -> dict[str, Place]:
    """The places of parameters that follow each other in each group of rows of ``name``; ``parts`` has their rows."""
    ends, end = {}, 0
    for part, rows in parts:
        ends[part] = (end, end + rows)
        end += rows
    return {part: Place(name, groups, *span, end, channels) for part, span in ends.items()}


# The kinds of a model's layers, as each architecture of Hugging Face says them.


Fields = Mapping[str, Any]
"""Of a ``config.json``."""


def all_global(config: Fields) -> list[LayerKind]:
    """Every layer sees its whole document."""
    return ["global"] * config["num_hidden_layers"]


def by_type(config: Fields) -> list[LayerKind]:
    """By ``layer_types``. Raises ConfigError for a type that this trainer lacks."""
    names: dict[str, LayerKind] = {"full_attention": "global", "sliding_attention": "window"}
    if strange := next((name for name in config["layer_types"] if name not in names), None):
        raise ConfigError(f"config.json has {strange!r} in layer_types; {' and '.join(names)} can be used")
    return [names[name] for name in config["layer_types"]]


def mistral(config: Fields) -> list[LayerKind]:
    """By ``layer_types`` in later files; else all layers have a window, or none."""
    if config.get("layer_types"):
        return by_type(config)
    return ["window" if config["sliding_window"] else "global"] * config["num_hidden_layers"]


def all_global_or_window(config: Fields) -> list[LayerKind]:
    """All layers have a window, or none."""
    windows = config["use_sliding_window"] and config["sliding_window"]
    return ["window" if windows else "global"] * config["num_hidden_layers"]


def qwen(config: Fields) -> list[LayerKind]:
    """Layers from ``max_window_layers`` on have a window."""
    if not (config["use_sliding_window"] and config["sliding_window"]):
        return all_global(config)
    if config.get("layer_types"):
        return by_type(config)
    full = config["max_window_layers"]
    return ["window" if layer >= full else "global" for layer in range(config["num_hidden_layers"])]


def gemma2(config: Fields) -> list[LayerKind]:
    """Every second layer sees its whole document. Raises ConfigError for another pattern without ``layer_types``."""
    return _last_of_each(2, config, "sliding_window_pattern", "_sliding_window_pattern")


def gemma3(config: Fields) -> list[LayerKind]:
    """Of each so many layers all but the last have a window. Raises ConfigError as ``gemma2``."""
    return _last_of_each(config.get("sliding_window_pattern", 6), config, "_sliding_window_pattern")


def olmo3(config: Fields) -> list[LayerKind]:
    """Every fourth layer sees its whole document, the others have a window."""
    return _last_of_each(4, config)


def _last_of_each(every: int, config: Fields, *not_read: str) -> list[LayerKind]:
    if config.get("layer_types"):
        return by_type(config)
    for name in not_read:
        if config.get(name, every) != every:
            raise ConfigError(
                f"config.json has {name} = {config[name]!r}, in place of which transformers takes {every} for "
                f"{config['model_type']}; give layer_types, or leave it out"
            )
    return ["window" if (layer + 1) % every else "global" for layer in range(config["num_hidden_layers"])]


def bamba(config: Fields) -> list[LayerKind]:
    """Attention in a list of layers, Mamba-2 in the others."""
    attention = config["attn_layer_indices"] or []
    return ["global" if layer in attention else "mamba" for layer in range(config["num_hidden_layers"])]


def qwen3_next(config: Fields) -> list[LayerKind]:
    """Attention in one of so many layers, gated DeltaNet in the others. Raises ConfigError as ``by_type``."""
    every = config["full_attention_interval"]
    linear = [(layer + 1) % every != 0 for layer in range(config["num_hidden_layers"])]
    if types := config.get("layer_types"):
        if strange := set(types) - {"linear_attention", "full_attention"}:
            raise ConfigError(f"config.json has {min(strange)!r} in layer_types; linear and full attention can be used")
        linear = [kind == "linear_attention" for kind in types]
    return ["delta" if state else "global" for state in linear]


def smollm3(config: Fields) -> list[LayerKind]:
    """Windows and positions by layer."""
    layers, every = range(config["num_hidden_layers"]), config["no_rope_layer_interval"]
    rotary = config.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in layers]
    windows = bool(config["use_sliding_window"] and config["sliding_window"])
    windowed = [windows and not has for has in rotary]
    if types := config.get("layer_types"):
        windowed = [kind == "window" for kind in by_type({"layer_types": types})]
    kinds: dict[tuple[bool, bool], LayerKind] = {
        (True, False): "global", (True, True): "window", (False, False): "nope", (False, True): "nope_window",
    }  # fmt: skip
    return [kinds[bool(has), window] for has, window in zip(rotary, windowed, strict=False)]
