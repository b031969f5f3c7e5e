"""The tensors of any checkpoint, one at a time: DCP folders and safetensors, without executing a pickle.

Supported: torch's distributed checkpoint (``.metadata`` and ``.distcp`` files), this trainer's own (safetensors whose
metadata has the position of each region), safetensors of whole tensors (Hugging Face), and one file per tensor-parallel
rank (``…tp-rank-0-of-2….safetensors``, nanotron).
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_TP_RANK = re.compile(r"tp-rank-(\d+)")
_DCP = ".metadata"


class FormatError(ValueError):
    """Not a readable checkpoint; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored part of a tensor, beginning at ``offset``."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint.

    ``ranks`` is the number of tensor-parallel files that contain it, counted by its first dimension; 0 if it is whole.
    """

    name: str
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)
    ranks: int = 0

    def read(self) -> torch.Tensor:
        """The whole tensor."""
        if len(self.chunks) == 1 and self.chunks[0].shape == self.shape:
            return self.chunks[0].read()
        whole: torch.Tensor | None = None
        for chunk in self.chunks:
            part = chunk.read().reshape(chunk.shape)
            whole = torch.zeros(self.shape, dtype=part.dtype) if whole is None else whole
            whole[tuple(slice(at, at + n) for at, n in zip(chunk.offset, chunk.shape, strict=True))] = part
        assert whole is not None
        return whole


def stored_tensors(path: Path) -> Iterator[Stored]:
    """The tensors at ``path``, a folder or a file, by name. Raises FormatError."""
    try:
        if (path / _DCP).is_file():
            yield from _distributed(path)
            return
        files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
        if not files:
            raise FormatError(f"{path} holds neither a distributed checkpoint ({_DCP}) nor safetensors files")
        yield from tensors_of_files(path, files)
    except (OSError, SafetensorError, pickle.UnpicklingError, EOFError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from error


def tensors_of_files(root: Path, files: Sequence[Path]) -> Iterator[Stored]:
    """The tensors in these safetensors ``files`` under ``root``, by name."""
    found: dict[str, Stored] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            regions = json.loads((file.metadata() or {}).get("regions", "{}"))
            rank = _TP_RANK.search(path.name)
            for key in file.keys():  # noqa: SIM118 -- not a mapping
                shape = tuple(file.get_slice(key).get_shape())
                chunk = Chunk((0,) * len(shape), shape, _reader(path, key))
                if rank:
                    name = f"{path.relative_to(root).with_name(_TP_RANK.sub('tp-rank-*', path.name))}:{key}"
                    _add_rank(found, name, int(rank[1]), chunk)
                elif key in regions:
                    whole, offset = tuple(regions[key]["shape"]), tuple(regions[key]["offset"])
                    found.setdefault(key, Stored(key, whole)).chunks.append(Chunk(offset, shape, chunk.read))
                else:
                    found[key] = Stored(key, shape, [chunk])
    yield from (found[name] for name in sorted(found))


def _add_rank(found: dict[str, Stored], name: str, rank: int, chunk: Chunk) -> None:
    before = found.get(name)
    ranks = max(before.ranks if before else 0, rank + 1)
    chunks = [*(before.chunks if before else []), Chunk((rank, *chunk.offset), (1, *chunk.shape), chunk.read)]
    found[name] = Stored(name, (ranks, *chunk.shape), chunks, ranks)


def _reader(path: Path, key: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
            return tensor

    return read


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


def _distributed(root: Path) -> Iterator[Stored]:
    with open(root / _DCP, "rb") as file:
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
