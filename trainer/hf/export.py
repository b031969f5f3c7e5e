"""A checkpoint of a run as a folder that Hugging Face's libraries load: weights, configuration and tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from opsd.checkpoints.manifest import read
from opsd.trainer.config import Config, ConfigError
from opsd.trainer.data.shards import DOCUMENT, TOKENIZER
from opsd.trainer.hf.config import config_of
from opsd.trainer.hf.weights import CONFIG, parameters_in, write


def export_checkpoint(settings: Config, folder: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write the checkpoint in ``folder`` as a model with its tokenizer to ``target``; returns the number of tensors.

    Positions are those with which it was trained last. Raises CheckpointError, ConfigError or OSError; ConfigError too
    if ``target`` has files of a model, of which programs would read some instead of these.
    """
    if older := next((path for pattern in (CONFIG, "*.safetensors*") for path in target.glob(pattern)), None):
        raise ConfigError(f"{target} already has a model ({older.name}); remove it, or name another folder")
    shape = settings.data.shape_at(read(folder).step)
    architecture, config = config_of(settings.model_with(shape), shape.sequence)
    tokens: dict[str, int] = {}
    corpora = [".", *settings.data.sources]
    paths = [Path(root, name, TOKENIZER) for root in (settings.data.shards, settings.data.fallback) for name in corpora]
    target.mkdir(parents=True, exist_ok=True)
    if tokenizer := next((path for path in paths if path.is_file()), None):
        tokens = _write_tokenizer(tokenizer, target, shape.sequence)
    config |= tokens
    count = write(target, parameters_in(folder), dtype, architecture, config)
    if tokens:
        _write_json(target / "generation_config.json", {"_from_model_config": True, **tokens})
    return count


def _write_tokenizer(tokenizer: Path, target: Path, sequence: int) -> dict[str, int]:
    """Copy the tokenizer with what transformers wants to know of it; the ids of its special tokens by their roles.

    The token that separates documents begins and ends a text.
    """
    shutil.copyfile(tokenizer, target / TOKENIZER)
    added = json.loads(tokenizer.read_text(encoding="utf-8")).get("added_tokens") or []
    special = [token for token in added if token.get("special")]
    others = [token["content"] for token in special if token["content"] != DOCUMENT]
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": sequence,
        "clean_up_tokenization_spaces": False, "additional_special_tokens": others,
    }  # fmt: skip
    if (document := next((token["id"] for token in special if token["content"] == DOCUMENT), None)) is not None:
        about |= {"bos_token": DOCUMENT, "eos_token": DOCUMENT}
    _write_json(target / f"{Path(TOKENIZER).stem}_config.json", about)
    return {} if document is None else {"bos_token_id": document, "eos_token_id": document}


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
