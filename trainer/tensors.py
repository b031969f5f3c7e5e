"""The tensors of any checkpoint, one at a time, without executing a pickle.

Supported: torch's distributed checkpoint, this trainer's own (safetensors whose metadata has the position of each
region), whole tensors as safetensors or by ``torch.save`` (Hugging Face, Lightning, plain programs), and one file per
tensor-parallel rank (nanotron, Megatron-LM, DeepSpeed, Meta's Llama), which become one tensor with a dimension for the
ranks.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open


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


_TP_RANK: Final = re.compile(
    r"(?<![a-z])(?:(?:tp|mp|(?:tensor|model)[-_]?(?:model[-_]?)?parallel)[-_]?(?:rank)?[-_]?|consolidated\.)(\d+)",
    re.IGNORECASE,
)
"""The rank in names like ``tp-rank-0-of-2``, ``mp_rank_00_001`` (its first number) and ``consolidated.00.pth``."""
_ANY_RANK: Final = re.compile(r"(?<![a-z])(?:rank|shard)[-_]?(\d+)", re.IGNORECASE)
_UNREADABLE: Final = (OSError, SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError)
_FILES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt"})
_NO_WEIGHTS: Final = re.compile(
    r"(?:optimizer|scheduler|scaler|sampler|rng_state|training_args|dl_state_dict)(?:_\d+)*\.(?:bin|pt|pth)"
)
"""What Hugging Face's Trainer and Accelerate save beside the weights, rank by rank."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a file; ``whole`` is the shape of the tensor of which it is the part at ``chunk.offset``."""

    path: Path
    key: str
    chunk: Chunk
    whole: tuple[int, ...]


def stored_tensors(path: Path) -> Iterator[Stored]:
    """The tensors at ``path``, a folder or a file, by name. Raises FormatError."""
    try:
        if (path / METADATA).is_file():
            yield from distributed(path)
            return
        folders = [*_folders(path)] if path.is_dir() else []
        parts = sorted(folder for folder in folders if (folder / METADATA).is_file())
        for folder in parts:
            for stored in distributed(folder):
                yield replace(stored, name=f"{folder.relative_to(path)}:{stored.name}")
        files = [path] if path.is_file() else [*_files(folder for folder in folders if folder not in parts)]
        if not files and not parts:
            raise FormatError(f"{path} holds neither a distributed checkpoint ({METADATA}) nor files of tensors")
        yield from tensors_of_files(path if path.is_dir() else path.parent, files)
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _folders(path: Path) -> Iterator[Path]:
    """``path`` and the folders below it, each once; links to folders are followed after the folders themselves."""
    seen: set[str] = set()
    links = [path]
    while links:
        for parent, names, _ in os.walk(links.pop(0), onerror=_raise):
            folder = Path(parent)
            if (real := os.path.realpath(folder)) in seen:
                names.clear()
                continue
            seen.add(real)
            names.sort()
            links += [folder / name for name in names if (folder / name).is_symlink()]
            yield folder


def _raise(error: OSError) -> None:
    raise error


def _files(folders: Iterable[Path]) -> Iterator[Path]:
    """The files with tensors in these ``folders``."""
    for folder in folders:
        for file in sorted(folder.iterdir()):
            if file.suffix in _FILES and file.is_file() and not _NO_WEIGHTS.fullmatch(file.name):
                yield file


def tensors_of_files(root: Path, files: Sequence[Path]) -> Iterator[Stored]:
    """The tensors in these ``files`` below ``root``, by name."""
    named: dict[str, list[tuple[int | None, _Entry]]] = defaultdict(list)
    by_key: dict[str, list[_Entry]] = defaultdict(list)
    for path in files:
        for entry in _entries(path):
            if (place := _template(_TP_RANK, path.relative_to(root))) is not None:
                named[f"{place[0]}:{entry.key}"].append((place[1], entry))
            else:
                by_key[entry.key].append(entry)
    for key, entries in by_key.items():
        if len(entries) == 1 or all(entry.whole != entry.chunk.shape for entry in entries):
            named[key] += [(None, entry) for entry in entries]
            continue
        for entry in entries:
            name, rank = _template(_ANY_RANK, entry.path.relative_to(root)) or (entry.path.relative_to(root), None)
            named[f"{name}:{key}"].append((rank, entry))
    for name in sorted(named):
        yield from _joined(name, named[name])


def _template(pattern: re.Pattern[str], path: Path) -> tuple[str, int] | None:
    """``path`` with a star for the rank, and the rank; None without one."""
    if not (found := [*pattern.finditer(str(path))]):
        return None
    begin, end = found[-1].span(1)
    return f"{str(path)[:begin]}*{str(path)[end:]}", int(found[-1][1])


def _joined(name: str, entries: list[tuple[int | None, _Entry]]) -> Iterator[Stored]:
    """The tensor, or several: where ranks have unlike shapes, or where the numbers are not those of ranks."""
    if entries[0][0] is None:
        yield Stored(name, entries[0][1].whole, [entry.chunk for _, entry in entries])
        return
    numbers = sorted({rank or 0 for rank, _ in entries})
    if numbers != [*range(numbers[0], numbers[0] + len(numbers))] or len(numbers) == 1:
        for number, entry in entries:
            yield Stored(name.replace("*", str(number), 1), entry.whole, [entry.chunk])
        return
    shapes = sorted({entry.chunk.shape for _, entry in entries})
    ranks = max(rank or 0 for rank, _ in entries) + 1
    for shape in shapes:
        parts = [
            Chunk((rank or 0, *(0 for _ in shape)), (1, *shape), entry.chunk.read)
            for rank, entry in entries
            if entry.chunk.shape == shape
        ]
        yield Stored(name if len(shapes) == 1 else f"{name} {list(shape)}", (ranks, *shape), parts, ranks)


def _entries(path: Path) -> list[_Entry]:
    try:
        return [*(_safetensors(path) if path.suffix == ".safetensors" else _saved(path))]
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


@contextmanager
def unreadable_as_format_error(path: Path) -> Iterator[None]:
    """Raises FormatError for what is raised where ``path`` cannot be read; a file that is gone is an OSError."""
    try:
        yield
    except (FormatError, FileNotFoundError):
        raise
    except (*_UNREADABLE, LookupError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> FormatError:
    return FormatError(f"{path} cannot be read: {(str(error) or type(error).__name__).splitlines()[0]}")


def _safetensors(path: Path) -> Iterator[_Entry]:
    with safe_open(path, framework="pt") as file:
        regions = json.loads((file.metadata() or {}).get("regions", "{}"))
        for key in file.keys():  # noqa: SIM118 -- not a mapping
            shape = tuple(file.get_slice(key).get_shape())
            region = regions.get(key, {"offset": (0,) * len(shape), "shape": shape})
            chunk = Chunk(tuple(region["offset"]), shape, _reader(path, key))
            yield _Entry(path, key, chunk, tuple(region["shape"]))


def _reader(path: Path, key: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
            return tensor

    return read


def _saved(path: Path) -> Iterator[_Entry]:
    for key, tensor in saved(path):
        shape = tuple(tensor.shape)
        yield _Entry(path, key, Chunk((0,) * len(shape), shape, partial(itself, tensor)), shape)


def itself(tensor: torch.Tensor) -> torch.Tensor:
    """Reads a tensor that is there already."""
    return tensor


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

    Raises FormatError, RuntimeError, EOFError or OSError.
    """
    yield from _flat("", content_of(path))


def content_of(path: Path, *plain: type) -> Any:
    """What a file of ``torch.save`` holds.

    What is not a tensor, a plain container or of a class in ``plain`` (arguments, enumerations, random states) is read
    as an inert object, so that nothing of it is executed. Raises FormatError, RuntimeError, EOFError or OSError.
    """
    others = []
    with suppress(ValueError), _no_pickle(path):  # of the format before torch 1.6 torch does not list the classes
        others = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    known = {f"{each.__module__}.{each.__qualname__}": each for each in plain}
    inert = [(_Inert, name) for name in others if name not in known]
    with torch.serialization.safe_globals([*plain, *inert]), _no_pickle(path):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path) or None)
        except pickle.UnpicklingError as error:
            raise FormatError(f"{path} holds objects that cannot be read without executing code of the file") from error


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
