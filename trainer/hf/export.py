"""A checkpoint of a run as a folder that Hugging Face's libraries load: weights, configuration and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from opsd.checkpoints.manifest import checksum, read
from opsd.durable import make_folder, move_into
from opsd.trainer.config import Config, ConfigError
from opsd.trainer.data.shards import TOKENIZER, DataError, Framing, find_index
from opsd.trainer.hf.config import config_of, settings_of
from opsd.trainer.hf.foreign import Foreign, parameters_of
from opsd.trainer.hf.weights import CONFIG, parameters_in, write

DRAFT = ".export"
CHAT_TEMPLATE = "chat_template.jinja"
"""Where transformers looks for it, beside the tokenizer."""


def export_checkpoint(
    settings: Config,
    folder: Path,
    target: Path,
    dtype: torch.dtype = torch.bfloat16,
    chat_template: Path | None = None,
) -> int:
    """Write the checkpoint in ``folder`` as a model with its tokenizer to ``target``; returns the number of tensors.

    ``chat_template`` is a file with a Jinja template, which needs a tokenizer beside it.
    Positions are those with which it was trained last. Raises CheckpointError, ConfigError or OSError.
    """
    shape = settings.data.shape_at(read(folder).step)
    architecture, config = config_of(settings.model_with(shape), shape.sequence)
    tokens: dict[str, int] = {}
    corpora = [".", *settings.data.sources]
    paths = [Path(root, name, TOKENIZER) for root in (settings.data.shards, settings.data.fallback) for name in corpora]
    with whole_or_not(target) as draft:
        if tokenizer := next((path for path in paths if path.is_file()), None):
            tokens = _write_tokenizer(tokenizer, _framing(tokenizer.parent), draft, shape.sequence)
        if chat_template is not None:
            if tokenizer is None:
                raise ConfigError(f"{settings.data.shards} has no {TOKENIZER}, and a chat template needs one")
            used = {framing.template for path in paths if (framing := _framing(path.parent)).template}
            if used - {checksum(chat_template)}:
                raise ConfigError(
                    f"the chats of {settings.data.shards} have another chat template than {chat_template}"
                )
            shutil.copyfile(chat_template, draft / CHAT_TEMPLATE)
        config |= tokens
        count = write(draft, parameters_in(folder), dtype, architecture, config)
        if tokens:
            _write_json(draft / "generation_config.json", {"_from_model_config": True, **tokens})
    return count


@contextmanager
def whole_or_not(target: Path) -> Iterator[Path]:
    """A folder whose files go to ``target`` at the end, the configuration last. A failure leaves nothing in it.

    Raises ConfigError if ``target`` has files of a model, of which programs would read some instead of these.
    """
    if older := next((path for pattern in (CONFIG, "*.safetensors*") for path in target.glob(pattern)), None):
        raise ConfigError(f"{target} already has a model ({older.name}); remove it, or name another folder")
    made = [folder for folder in (target, *target.absolute().parents) if not folder.exists()]
    draft = target / DRAFT
    make_folder(target)
    shutil.rmtree(draft, ignore_errors=True)  # a killed process has left it
    draft.mkdir()
    try:
        yield draft
        move_into(draft, target, CONFIG)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(OSError):  # it is not empty
            for folder in made:
                folder.rmdir()


def _framing(corpus: Path) -> Framing:
    try:
        return find_index(corpus, None).framing
    except DataError:  # the shards may be gone after the run, and only the tokenizer be there
        return Framing()


def _write_tokenizer(tokenizer: Path, framing: Framing, target: Path, sequence: int) -> dict[str, int]:
    """Copy the tokenizer with what transformers wants to know of it; the ids of its special tokens by their roles.

    A text begins and ends with what documents of the training have had there.
    """
    shutil.copyfile(tokenizer, target / TOKENIZER)
    added = json.loads(tokenizer.read_text(encoding="utf-8")).get("added_tokens") or []
    special = {token["content"]: token["id"] for token in added if token.get("special")}
    bos, eos = framing.begin[0], framing.separator
    others = [token for token in special if token not in (bos, eos)]
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": sequence,
        "clean_up_tokenization_spaces": False, "additional_special_tokens": others,
    }  # fmt: skip
    if known := bos in special and eos in special:
        about |= {"bos_token": bos, "eos_token": eos}
    _write_json(target / f"{Path(TOKENIZER).stem}_config.json", about)
    return {"bos_token_id": special[bos], "eos_token_id": special[eos]} if known else {}


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def export_foreign(source: Foreign, target: Path) -> int:
    """Write the checkpoint ``source`` as a model to ``target``, in its own type; returns the number of tensors.

    Raises ConfigError, FormatError or OSError.
    """
    parameters = parameters_of(source)
    model = settings_of(source.config)
    architecture, config = config_of(model, source.config.get("max_position_embeddings") or 0)
    dtype = next(each for each in parameters if each.name == "embedding.weight").read().dtype
    with whole_or_not(target) as draft:
        return write(draft, parameters, dtype, architecture, config)
