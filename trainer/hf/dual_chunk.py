"""Dual-chunk attention in a ``config.json``: the field that Qwen's models for a million tokens have, and vLLM reads."""

from __future__ import annotations

from typing import Any, Final

from opsd.trainer.config import ConfigError
from opsd.trainer.hf.kinds import Fields
from opsd.trainer.model_settings import LayerKind, ModelSettings

FIELD: Final = "dual_chunk_attention_config"
_FIELDS: Final = {
    "dual_chunk": ("chunk_size", 8192), "dual_chunk_local": ("local_size", 1024),
    "dual_chunk_positions": ("original_max_position_embeddings", 0),
}  # fmt: skip
"""Ours, theirs, and what vLLM takes where the file leaves it out."""


def settings_of_dual_chunks(given: Fields) -> dict[str, Any]:
    """The settings for the field's content. Raises ConfigError for what this trainer does not compute."""
    known = {theirs for theirs, _ in _FIELDS.values()}
    if strange := next((name for name, value in given.items() if value and name not in known), None):
        raise ConfigError(f"config.json has {strange} in {FIELD}, which this trainer does not compute")
    return {ours: given.get(theirs, default) for ours, (theirs, default) in _FIELDS.items()}


def with_dual_chunks(kinds: list[LayerKind]) -> list[LayerKind]:
    """The kinds of a model's layers if its file has the field. Raises ConfigError for layers with a window."""
    if set(kinds) != {"global"}:
        raise ConfigError(f"config.json has {FIELD} with windows, which vLLM does not compute; remove one of them")
    return ["dual_chunk"] * len(kinds)


def config_of_dual_chunks(model: ModelSettings) -> dict[str, Any]:
    """The field for ``model``, if all its layers are so."""
    if set(model.kinds) != {"dual_chunk"}:
        return {}
    return {FIELD: {theirs: getattr(model, ours) for ours, (theirs, _) in _FIELDS.items()}}
