"""Checkpoints of torchtitan, nanotron and Megatron-LM as models of Hugging Face.

Each format has a reader, which says what the model is in the fields of ``config.json`` and where our parameters are.
The rest is the same for all: a tensor that is missing, left over or of another shape is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from opsd.trainer.config import ConfigError
from opsd.trainer.hf.config import fields_in, settings_of
from opsd.trainer.hf.kinds import Fields, Place
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.tensors import METADATA, Chunk, FormatError, Stored, stored_tensors, unreadable_as_format_error

TITAN: Final = {
    "embedding": "tok_embeddings", "norm": "norm", "head": "lm_head",
    "attention.query": "attention.wq", "attention.key": "attention.wk", "attention.value": "attention.wv",
    "attention.output": "attention.wo", "attention.query_norm": "attention.q_norm",
    "attention.key_norm": "attention.k_norm", "attention_norm": "attention_norm", "ffn_norm": "ffn_norm",
    "ffn.gate": "feed_forward.w1", "ffn.up": "feed_forward.w3", "ffn.down": "feed_forward.w2",
}  # fmt: skip
_RENAMED: Final = {"attention.qkv_linear.": "attention.", "output.weight": "lm_head.weight"}
"""Names of torchtitan 0.3, and of 0.2, in the form that both have had."""
_NOT_MODEL: Final = ("optimizer", "lr_scheduler", "dataloader", "train_state")


@dataclass(frozen=True, slots=True)
class Foreign:
    """A checkpoint of another program: its model as a ``config.json`` says it, and its ``tensors`` by their names.

    ``names`` has the names, or places, of our parameters, in layer N after ``layer`` with that number.
    ``interleaved`` says that neighbouring channels of queries and keys are rotated, not those of the halves.
    """

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, Stored]
    names: Mapping[str, str | Place]
    layer: str
    interleaved: bool

    def place(self, name: str) -> Place:
        """Where our parameter ``name`` is stored."""
        part, _, end = name.rpartition(".")
        before = ""
        if part.startswith("blocks."):
            _, number, part = part.split(".", 2)
            before = self.layer.format(number)
        there = self.names[part]
        if isinstance(there, str):
            return Place(f"{before}{there}.{end}")
        return Place(f"{before}{there.name}.{end}", there.groups, there.begin, there.end, there.of)


def foreign(folder: Path, config: Path | None = None) -> Foreign:
    """The checkpoint in ``folder``. Raises ConfigError or FormatError for one that cannot be read, or of no such kind.

    ``config`` is a ``config.json`` of Hugging Face, which torchtitan needs since its checkpoints do not say the model.
    """
    from opsd.trainer.hf.megatron import MEGATRON, NEWEST, in_newest, megatron
    from opsd.trainer.hf.nanotron import NANOTRON, nanotron

    if (folder / NEWEST).is_file():
        folder = in_newest(folder)
    if any(folder.glob(MEGATRON)):
        return megatron(folder)
    if (folder / NANOTRON).is_file():
        return nanotron(folder)
    if (folder / "common.pt").is_file():
        raise FormatError(
            f"{folder} is a torch_dist checkpoint of Megatron-LM; save it again with --ckpt-convert-format torch"
        )
    if (folder / METADATA).is_file():
        return titan(folder, config or folder / "config.json")
    raise FormatError(
        f"{folder} is no checkpoint of torchtitan ({METADATA}), nanotron ({NANOTRON}) or Megatron-LM ({MEGATRON})"
    )


def titan(folder: Path, config: Path) -> Foreign:
    """A distributed checkpoint of torchtitan, whose model is that of ``config``."""
    if not config.is_file():
        raise ConfigError(
            f"{folder} does not say what model it has; give the config.json of Hugging Face for it with --config"
        )
    fields = fields_in(config)
    if (kind := fields.get("model_type")) not in ("llama", "qwen3"):
        raise ConfigError(f"{config} has model_type {kind!r}; of torchtitan's models llama and qwen3 can be read")
    tensors = {}
    for stored in stored_tensors(folder):
        name = stored.name
        for new, old in _RENAMED.items():
            name = name.replace(new, old)
        if not name.startswith(_NOT_MODEL):
            tensors[name] = stored
    return Foreign(folder, fields, tensors, TITAN, "layers.{}.", interleaved=kind == "llama")


def demand_only(where: object, fields: Fields, only: Fields) -> None:
    """Raises ConfigError for a field that has another value than the one that can be read."""
    for name, value in only.items():
        if name in fields and fields[name] != value:
            raise ConfigError(f"{where} has {name} = {fields[name]!r}; only {value!r} can be read")


def parameters_of(source: Foreign) -> list[Stored]:
    """Our parameters in the checkpoint, to be read one by one.

    Raises ConfigError unless they are all of its tensors.
    """
    settings = settings_of(source.config)
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in Decoder(settings).saved()}
    places = {name: source.place(name) for name in shapes}
    _demand_all(source, {place.name for place in places.values()}, settings)
    for name, place in places.items():
        found, expected = source.tensors[place.name].shape, place.stored_shape(shapes[name])
        if found != expected:
            raise ConfigError(f"{source.folder} has {place.name} of shape {list(found)}, not {list(expected)}")
    return [
        Stored(name, shape, [Chunk((0,) * len(shape), shape, partial(_read, source, name, settings.head_channels))])
        for name, shape in shapes.items()
    ]


def _demand_all(source: Foreign, wanted: set[str], settings: ModelSettings) -> None:
    head, embedding = (source.place(f"{name}.weight").name for name in ("head", "embedding"))
    missing = sorted(wanted - source.tensors.keys())
    unknown = sorted(source.tensors.keys() - wanted - ({head} if settings.tied else set()))
    if missing or unknown:
        what = f"has no tensor {missing[0]}" if missing else f"has the tensor {unknown[0]}, which the model has not"
        raise ConfigError(f"{source.folder} {what} ({len(missing)} missing, {len(unknown)} unknown)")
    for name in sorted(wanted):
        stored = source.tensors[name]
        parts = {chunk.offset: _size(chunk.shape) for chunk in stored.chunks}
        if sum(parts.values()) != _size(stored.shape):
            raise ConfigError(f"{source.folder} has only a part of {name}")
    if settings.tied and head in source.tensors:
        one, other = (_whole(source, name) for name in (head, embedding))
        if not torch.equal(one, other):
            raise ConfigError(f"{source.folder} has another {head} than {embedding}, while the model shares them")


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _whole(source: Foreign, name: str) -> torch.Tensor:
    with unreadable_as_format_error(source.folder):
        tensor = source.tensors[name].read()
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ConfigError(f"{source.folder} has {name} as {tensor.dtype}; only weights of 16 bits or more can be used")
    return tensor


def _read(source: Foreign, name: str, channels: int) -> torch.Tensor:
    place = source.place(name)
    tensor = _whole(source, place.name)
    rows = tensor if place.whole else place.rows(tensor).flatten(0, 1)
    if source.interleaved and name.split(".")[-2] in ("query", "key"):
        rows = rows.view(-1, channels // 2, 2, *rows.shape[1:]).transpose(1, 2).flatten(0, 2)
    return rows.contiguous()
