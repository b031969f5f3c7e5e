"""The weights of Hugging Face's models: read into ours, and written from our checkpoints, as safetensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from opsd.checkpoints.manifest import verify
from opsd.trainer.config import ConfigError
from opsd.trainer.hf.architectures import Architecture, architecture_of
from opsd.trainer.hf.blocks import ROUTER_BIAS
from opsd.trainer.hf.config import fields_in, settings_of
from opsd.trainer.hf.kinds import Fields, Place
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.regions import Region, region_of
from opsd.trainer.tensors import Stored, tensors_of_files

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
FILE_BYTES = 4_000_000_000
"""File size from which the next tensor goes into another file."""
_DTYPES: Final = {"F64", "F32", "F16", "BF16"}
_NOT_WEIGHTS: Final = re.compile(r".*rotary_emb\.inv_freq")
"""Tensors that older releases stored and that are computed from the configuration."""
_OS_ERROR: Final = re.compile(r"os error (\d+)")
_DERIVED: Final = ("kinds", "attention_scale")
_SETTING: Final = {"kinds": "pattern", "head_channels": "head_dim"}


def config_in(folder: Path) -> dict[str, Any]:
    """The ``config.json`` in ``folder``. Raises ConfigError."""
    return fields_in(folder / CONFIG)


def fill(model: Decoder, folder: Path, *, part: bool = False) -> None:
    """Load the weights in ``folder`` into this rank's part of ``model``, which has the first layers only if ``part``.

    Raises ConfigError if they do not fit: another architecture, a tensor of another shape, one too few or too many.
    """
    try:
        config = config_in(folder)
        if not part:
            demand_same(model.settings, folder)
        _load(model, folder, architecture_of(config), part=part)
    except ConfigError as error:
        raise ConfigError(f"run.initial: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"run.initial: {folder} cannot be used: {error}") from error


def demand_same(settings: ModelSettings, folder: Path) -> None:
    """Raises ConfigError if the model in ``folder`` is another one than that of ``settings``, or cannot be read."""
    wanted, given = settings_of(config_in(folder)).architecture, settings.architecture
    for key in sorted(wanted.keys() | given.keys(), key=lambda key: (key in _DERIVED, key)):
        if wanted.get(key) != given.get(key):
            name = f"model.{_SETTING.get(key, key)}"
            raise ConfigError(
                f"{folder / CONFIG} needs {name} = {_toml(wanted.get(key))}, not {_toml(given.get(key))}; "
                f"python -m opsd.trainer.huggingface settings {folder} prints the section [model] for it"
            )


def _toml(value: object) -> str:
    return "its default" if value is None else json.dumps(value)


@torch.no_grad()
def _load(model: Decoder, folder: Path, architecture: Architecture, *, part: bool) -> None:
    files = _files(folder)
    with torch.device("meta"):
        whole = Decoder(model.settings)
    places = {name: architecture.places(name, value.shape, model.settings) for name, value in whole.saved()}
    wanted = {place.name for each in places.values() for place in each}
    optional = {architecture.place("head.weight", model.settings).name} if model.settings.tied else set()
    missing = sorted(wanted - files.keys())
    unknown = sorted(name for name in files.keys() - wanted - optional if not _NOT_WEIGHTS.fullmatch(name))
    if missing or (unknown and not part):
        what = f"has no tensor {missing[0]}" if missing else f"has the tensor {unknown[0]}, which the model has not"
        raise ConfigError(f"{folder} {what} ({len(missing)} missing, {len(unknown)} unknown)")
    for name in optional & files.keys():
        _demand_equal(folder, files, name, architecture.place("embedding.weight", model.settings).name)
    for name, parameter in model.saved():
        region = region_of(parameter)
        for place, part_of in _parts(places[name], region).items():
            _fill(part_of, files[place.name], place)
        if offset := architecture.offset(name):
            region.local.add_(offset)


def _demand_equal(folder: Path, files: dict[str, Path], head: str, embedding: str) -> None:
    """Raises ConfigError if a tied output projection is not the embedding: transformers does not tie it then."""
    with safe_open(files[head], framework="pt") as first, safe_open(files[embedding], framework="pt") as second:
        stored, expected = first.get_tensor(head), second.get_tensor(embedding)
    if not torch.equal(stored.to(expected.dtype), expected):
        raise ConfigError(
            f"{folder} has another {head} than {embedding}, while {CONFIG} has tie_word_embeddings; set that to false "
            "to use both, or remove the tensor"
        )


def _parts(places: list[Place], region: Region) -> dict[Place, Region]:
    """The part of ``region`` in each of the ``places``: all of it, or its expert."""
    if len(region.shape) < 3:
        return {places[0]: region}
    first = region.offset[0]
    return {
        places[first + row]: Region(local, region.shape[1:], region.offset[1:])
        for row, local in enumerate(region.local)
    }


def _fill(region: Region, path: Path, place: Place) -> None:
    with safe_open(path, framework="pt") as file:
        stored, expected = file.get_slice(place.name), place.stored_shape(region.shape)
        if (shape := tuple(stored.get_shape())) != expected:
            raise ConfigError(f"{path.parent} has {place.name} of shape {list(shape)}, not {list(expected)}")
        if (kind := stored.get_dtype()) not in _DTYPES:
            raise ConfigError(f"{path.parent} has {place.name} as {kind}; only floating-point weights can be used")
        whole = stored if place.whole else place.rows(stored[:]).flatten(0, 1)
        region.local.copy_(whole[region.slices])


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor. Raises ConfigError if there are no safetensors, or those of two models."""
    index, single = folder / INDEX, folder / SINGLE
    if index.exists() and single.exists() and single.name not in json.loads(index.read_text())["weight_map"].values():
        raise ConfigError(f"{folder} has both {SINGLE} and {INDEX}, of which programs read one; remove the older")
    if index.exists():
        return {name: folder / Path(file).name for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not single.exists():
        raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}; save the model with safe_serialization=True")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def write(
    folder: Path, tensors: Iterable[Stored], dtype: torch.dtype, architecture: Architecture, config: Fields
) -> int:
    """Write our parameters as a model of ``architecture`` into ``folder``; returns the number of tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    size = 0
    for number, group in enumerate(_groups(tensors, dtype, architecture, settings_of(config)), start=1):
        file = f"model-{number:05d}.safetensors"
        _save(group, folder / file)
        names |= dict.fromkeys(group, file)
        size += sum(tensor.nbytes for tensor in group.values())
    if len(set(names.values())) == 1:
        (folder / next(iter(names.values()))).rename(folder / SINGLE)
    else:
        index = {"metadata": {"total_size": size}, "weight_map": names}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    text = json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=1)
    (folder / CONFIG).write_text(text, encoding="utf-8")
    return len(names)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write ``tensors`` with the mode that the umask gives; safetensors lets only the owner read."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the number of the system's error is in its text only
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error
    path.chmod(mode)


def _groups(
    tensors: Iterable[Stored], dtype: torch.dtype, architecture: Architecture, model: ModelSettings
) -> Iterator[dict[str, torch.Tensor]]:
    group: dict[str, torch.Tensor] = {}
    packing: dict[str, tuple[torch.Tensor, int]] = {}
    for stored in tensors:
        values = stored.read() - architecture.offset(stored.name)
        places = architecture.places(stored.name, values.shape, model)
        parts = values.unbind() if values.dim() > 2 else [values]
        kind = torch.float32 if stored.name.endswith(ROUTER_BIAS) else dtype
        for place, part in zip(places, parts, strict=True):
            if (complete := _pack(part.to(kind), place, packing)) is not None:
                group[place.name] = complete
        if sum(tensor.nbytes for tensor in group.values()) > FILE_BYTES:
            yield group
            group = {}
    if group:
        yield group


def _pack(part: torch.Tensor, place: Place, packing: dict[str, tuple[torch.Tensor, int]]) -> torch.Tensor | None:
    """The tensor at ``place``, once all its parts have come; until then they are in ``packing``."""
    if place.whole:
        return part.clone()
    shape = place.stored_shape(part.shape)
    whole, missing = packing.pop(place.name, (part.new_empty(0), 0))
    if not missing:
        whole, missing = part.new_empty(shape), shape[0]
    rows = place.rows(whole)
    rows.copy_(part.view_as(rows))
    if missing == len(part):
        return whole
    packing[place.name] = whole, missing - len(part)
    return None


def parameters_in(checkpoint: Path) -> Iterator[Stored]:
    """The model's parameters in one of our checkpoints, which is verified first. Raises CheckpointError."""
    files = [checkpoint / entry.name for entry in verify(checkpoint).files]
    for stored in tensors_of_files(checkpoint, files):
        if stored.name.startswith("model."):
            yield Stored(stored.name.removeprefix("model."), stored.shape, stored.chunks)
