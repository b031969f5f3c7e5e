"""Tensors in pickles of torch, read without executing anything that a pickle names.

These are torch's distributed checkpoint (``.metadata`` and ``.distcp`` files) and files of ``torch.save``.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from opsd.trainer.stored import Chunk, FormatError, Stored

METADATA = ".metadata"
"""The file that makes a folder a distributed checkpoint."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the pickled metadata of torch's distributed checkpoint; only its plain classes are allowed."""

    _ALLOWED = frozenset({
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        """Look up ``name`` of ``module`` if it is allowed. Raises UnpicklingError."""
        if (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which plain metadata does not")


def distributed(root: Path) -> Iterator[Stored]:
    """The tensors of the distributed checkpoint in ``root``. Raises FormatError, OSError or UnpicklingError."""
    with open(root / METADATA, "rb") as file, _no_pickle(root / METADATA):
        metadata = _MetadataUnpickler(file).load()
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()}
    for name in sorted(metadata.state_dict_metadata):
        entry = metadata.state_dict_metadata[name]
        if not hasattr(entry, "chunks"):
            continue
        stored = Stored(name, tuple(entry.size))
        for chunk in entry.chunks:
            info = places[name, tuple(chunk.offsets)]
            if info.transform_descriptors:
                raise FormatError(f"{root} is compressed or encrypted, which cannot be read")
            if Path(info.relative_path).name != info.relative_path:
                raise FormatError(f"{root} names files outside its folder")
            read = _slice_reader(root / info.relative_path, info.offset, info.length)
            stored.chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), read))
        yield stored


def _slice_reader(path: Path, offset: int, length: int) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        with open(path, "rb") as file:
            file.seek(offset)
            content = io.BytesIO(file.read(length))
        tensor: torch.Tensor = torch.load(content, map_location="cpu", weights_only=True)
        return tensor

    return read


@contextmanager
def _no_pickle(path: Path) -> Iterator[None]:
    """Raises FormatError where the unpickler stumbles over bytes that are none of a pickle."""
    try:
        yield
    except (AttributeError, ImportError, LookupError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is no file of torch.save, or is damaged ({type(error).__name__})") from error


class _Inert:
    """Replaces an object of any other class: its arguments and its state are dropped."""

    def __new__(cls, *_: object, **__: object) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def saved(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a file of ``torch.save``, however nested, with their keys joined by dots.

    What is not a tensor or a plain container (arguments, enumerations, random states) is read as an inert object, so
    that nothing of it is executed. Raises FormatError, RuntimeError, EOFError or OSError.
    """
    others = []
    with suppress(ValueError), _no_pickle(path):  # of the format before torch 1.6 torch does not list the classes
        others = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    with torch.serialization.safe_globals([(_Inert, name) for name in others]), _no_pickle(path):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path) or None)
        except pickle.UnpicklingError as error:
            raise FormatError(f"{path} holds objects that cannot be read without executing code of the file") from error
    yield from _flat("", content)


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _flat(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for number, inner in enumerate(value):
            yield from _flat(f"{name}.{number}" if name else str(number), inner)
