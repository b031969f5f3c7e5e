"""Reading checkpoint files: this rank's own, and those of any other layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from opsd.checkpoints.manifest import (
    CheckpointError,
    FileEntry,
    Manifest,
    checksum,
)
from opsd.trainer.checkpoint import State, file_layout
from opsd.trainer.load import copy_file, load
from opsd.trainer.regions import Region


def split(shape: tuple[int, ...], cuts: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of a grid of ``cuts`` nearly equal parts per dimension, empty ones included."""
    parts: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for length, count in zip(shape, cuts, strict=True):
        size = -(-length // count)
        bounds = [(min(i * size, length), min((i + 1) * size, length)) for i in range(count)]
        parts = [((*offset, low), (*sizes, high - low)) for offset, sizes in parts for low, high in bounds]
    return parts


def states(tensors: dict[str, torch.Tensor], cuts: tuple[int, int]) -> list[State]:
    """The state of every rank of a grid layout; tensors with fewer than two dimensions are held by all."""
    ranks: list[State] = [{} for _ in range(cuts[0] * cuts[1])]
    for name, tensor in tensors.items():
        grid = split(tuple(tensor.shape), cuts if tensor.dim() == 2 else (1,) * tensor.dim())
        for rank, state in enumerate(ranks):
            offset, sizes = grid[rank % len(grid)]
            window = tuple(slice(at, at + n) for at, n in zip(offset, sizes, strict=True))
            state[name] = Region(tensor[window].clone(), tuple(tensor.shape), offset)
    return ranks


def write(folder: Path, ranks: list[State]) -> Manifest:
    """A checkpoint as the persist processes write it."""
    entries = []
    for rank, state in enumerate(ranks):
        header, starts, size = file_layout(state)
        content = bytearray(size)
        content[: len(header)] = header
        for name, start in starts.items():
            local = state[name].local
            raw = bytes(local.contiguous().flatten().view(torch.uint8).numpy()) if local.numel() else b""
            content[start : start + len(raw)] = raw
        path = folder / f"rank-{rank:04d}.safetensors"
        path.write_bytes(content)
        entries.append(FileEntry(path.name, size, ""))
    return Manifest(20, 80, {"dp": len(ranks)}, "", tuple(entries), "local", 0.0)


def tensors_like(shapes: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    tensors = {f"m{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    return tensors | {"norm": torch.randn(5), "updates": torch.tensor([7.0])}


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, State]:
    """The file of the second of three ranks, and a state of zeros in its layout, one tensor of it transposed."""
    ranks = states(tensors_like([(7, 5), (300, 4)]), (3, 1))
    write(tmp_path, ranks)
    state = {name: replace(region, local=torch.zeros_like(region.local)) for name, region in ranks[1].items()}
    state["m1"] = replace(state["m1"], local=torch.zeros(state["m1"].local.shape[::-1]).T)
    return tmp_path / "rank-0001.safetensors", state


def test_a_ranks_own_file_is_copied_and_hashed(own: tuple[Path, State]) -> None:
    """In one pass, whatever the strides of the tensors; the names that the file holds are told."""
    path, state = own
    names, found = copy_file(path, state)
    assert (set(names), found) == (state.keys(), checksum(path))
    with safe_open(path, framework="pt") as file:
        for name, region in state.items():
            assert torch.equal(region.local, file.get_tensor(name)), name


@pytest.mark.parametrize("damage", ["another layout", "cut off", "no file of ours", "empty"])
def test_a_file_that_is_not_of_this_rank_is_refused(own: tuple[Path, State], damage: str) -> None:
    """By name, and without a guess at what it might be."""
    path, state = own
    content = path.read_bytes()
    if damage == "another layout":
        state["m0"] = replace(state["m0"], offset=(0, 0))
    elif damage == "cut off":
        path.write_bytes(content[:-3])
    else:
        path.write_bytes(b"" if damage == "empty" else bytes(200))
    with pytest.raises(CheckpointError, match=r"rank-0001\.safetensors (is not the state of|is truncated)"):
        copy_file(path, state)


GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=3), old=GRIDS, new=GRIDS)
def test_any_layout_reads_any_other(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, int]],
    old: tuple[int, int],
    new: tuple[int, int],
) -> None:
    """A checkpoint written by one grid of ranks is read bit for bit by any other, uneven and empty parts included."""
    folder = tmp_path_factory.mktemp("c")
    tensors = tensors_like(shapes)
    manifest = write(folder, states(tensors, old))
    wanted = states(tensors, new)
    for rank, expected in enumerate(wanted):
        mine = {name: replace(region, local=torch.full_like(region.local, -9)) for name, region in expected.items()}
        load(folder, manifest, mine, rank)
        for name, region in expected.items():
            assert torch.equal(mine[name].local, region.local)


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    """A rank's file opens with the safetensors library, tensors aligned, with the place of each region."""
    tensors = tensors_like([(6, 4)])
    write(tmp_path, states(tensors, (2, 1)))
    with safe_open(tmp_path / "rank-0001.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert torch.equal(file.get_tensor("m0"), tensors["m0"][3:])
        assert json.loads(file.metadata()["regions"])["m0"] == {"shape": [6, 4], "offset": [3, 0]}
    assert file_layout(states(tensors, (2, 1))[0])[1]["m0"] % 64 == 0


def test_bfloat16_survives(tmp_path: Path) -> None:
    """Half-precision tensors are stored as they are."""
    tensor = torch.randn(4, 4).bfloat16()
    manifest = write(tmp_path, states({"m": tensor}, (2, 1)))
    mine = {"m": Region(torch.zeros(4, 4, dtype=torch.bfloat16), (4, 4), (0, 0))}
    load(tmp_path, manifest, mine)
    assert torch.equal(mine["m"].local, tensor)


def test_replicas_do_not_hide_a_hole(tmp_path: Path) -> None:
    """Two files with the same half of a tensor do not pass for the whole of it."""
    ranks = states({"m": torch.randn(4, 4)}, (2, 1))
    manifest = write(tmp_path, [ranks[0], ranks[0]])
    with pytest.raises(CheckpointError, match="does not hold all of m"):
        load(tmp_path, manifest, {"m": Region(torch.zeros(4, 4), (4, 4), (0, 0))})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor of the model is refused with its name."""
    manifest = write(tmp_path, states({"a": torch.ones(2, 2)}, (1, 1)))
    wanted = states({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, (1, 1))[0]
    with pytest.raises(CheckpointError, match="does not hold all of b"):
        load(tmp_path, manifest, wanted)
