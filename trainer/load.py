"""Filling this rank's state from the files of a checkpoint, whatever layout wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from opsd.checkpoints.manifest import CheckpointError, Manifest
from opsd.trainer import memory
from opsd.trainer.checkpoint import State, StateFile, file_layout
from opsd.trainer.regions import Region

_BLOCK = 1 << 22


@torch.no_grad()
def load(folder: Path, manifest: Manifest, state: State, rank: int = 0) -> None:
    """Fill ``state`` from the files of a checkpoint, each region from the files that overlap it.

    This rank's own file comes first; in an unchanged layout no other file is read. Raises CheckpointError if the files
    do not cover the state.
    """
    missing = {name: region.local.numel() for name, region in state.items()}
    missing = {name: count for name, count in missing.items() if count}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    names = [entry.name for entry in manifest.files]
    for name in names[rank : rank + 1] + names[:rank] + names[rank + 1 :]:
        if not missing:
            break
        with StateFile(folder / name) as file:
            for tensor in missing.keys() & file.regions.keys():
                offset = file.regions[tensor]
                if (tensor, offset) in seen:  # replicas of one region count once
                    continue
                seen.add((tensor, offset))
                missing[tensor] -= _copy_overlap(file.tensor(tensor), offset, state[tensor])
        missing = {tensor: count for tensor, count in missing.items() if count}
    if missing:
        raise CheckpointError(f"{folder} does not hold all of {min(missing)}", str(min(missing)))


def _copy_overlap(stored: torch.Tensor, offset: Iterable[int], region: Region) -> int:
    """Copy the overlap of the stored region at ``offset`` with ours; returns the number of elements."""
    source, target = [], []
    for theirs, their_length, ours, our_length in zip(
        offset, stored.shape, region.offset, region.local.shape, strict=True
    ):
        begin, end = max(theirs, ours), min(theirs + their_length, ours + our_length)
        if begin >= end:
            return 0
        source.append(slice(begin - theirs, end - theirs))
        target.append(slice(begin - ours, end - ours))
    part = stored[tuple(source)]
    region.local[tuple(target)].copy_(part)
    return part.numel()


def load_memory(folder: Path, info: memory.StateInfo, state: State) -> Manifest:
    """Fill ``state`` from the states in ``folder``, in this node's memory, of the save of ``info``.

    The rank's own state is verified while it is copied; each other one is verified by its rank. Raises CheckpointError
    or OSError; then ``state`` is partly overwritten.
    """
    manifest = memory.manifest_of(list(memory.infos_of(folder, info.save)))
    own = memory.state_path(folder, info.rank)
    names, checksum = copy_file(own, state)
    if checksum != info.checksum:
        raise CheckpointError(f"{own} does not match its checksum", own.name)
    if rest := {name: region for name, region in state.items() if name not in names}:
        load(folder, manifest, rest, [entry.name for entry in manifest.files].index(own.name))
    return manifest


@torch.no_grad()
def copy_file(path: Path, state: State) -> tuple[list[str], str]:
    """Copy this rank's file in this layout into ``state``; returns the names of its tensors and its checksum.

    The file is read, not mapped, because mapping the pages takes nearly as long as the copy; another thread hashes it.
    Raises CheckpointError if it is another file, OSError if it cannot be read.
    """
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(1) as hashing:
        header = file.read(8)
        header += file.read(int.from_bytes(header, "little"))
        names = _names(header)
        if not state.keys() >= set(names) or file_layout({name: state[name] for name in names})[0] != header:
            raise CheckpointError(f"{path} is not the state of this rank in this layout", path.name)
        digest.update(header)
        for name in names:
            local = state[name].local
            direct = local.device.type == "cpu" and local.is_contiguous()
            target = local if direct else torch.empty(local.shape, dtype=local.dtype)
            whole = target.view(-1).view(torch.uint8).numpy().data
            for at in range(0, len(whole), _BLOCK):
                block = whole[at : at + _BLOCK]
                if file.readinto(block) != len(block):
                    raise CheckpointError(f"{path} is truncated", path.name)
                hashing.submit(digest.update, block)
            if not direct:
                local.copy_(target)
    return names, f"xxh3_128:{digest.hexdigest()}"


def _names(header: bytes) -> list[str]:
    try:
        return [name for name in json.loads(header[8:]) if name != "__metadata__"]
    except (ValueError, TypeError):
        return []
