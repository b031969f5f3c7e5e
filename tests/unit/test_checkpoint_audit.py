"""`opsd checkpoint audit`: copies are named in every form of checkpoint, and independent shards are not."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from opsd.commands.checkpoint import checkpoint
from opsd.trainer.duplicate_shards import examine
from opsd.trainer.tensors import Chunk, FormatError, Stored, stored_tensors

torch.set_num_threads(1)


def stored(values: torch.Tensor, name: str = "w", ranks: int = 0) -> Stored:
    shape = tuple(values.shape)
    return Stored(name, shape, [Chunk((0,) * len(shape), shape, lambda: values)], ranks)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def audit(*arguments: object) -> Result:
    return CliRunner().invoke(checkpoint, ["audit", *map(str, arguments)], standalone_mode=False)


@pytest.mark.parametrize(("dimension", "shards"), [(0, 2), (0, 4), (1, 2), (1, 8)])
def test_copies_are_found_along_either_dimension(dimension: int, shards: int) -> None:
    """A matrix put together from one shard several times is named, with the number of shards."""
    whole = torch.cat([drawn(48, 40)] * shards, dimension)
    finding = examine(stored(whole))
    assert finding is not None
    assert (finding.dimension, finding.shards, finding.copies) == (dimension, shards, tuple(range(shards)))
    assert finding.correlation == 1.0


def test_copies_that_drifted_apart_are_found() -> None:
    """Equal shards that were trained on, so that their bits differ, are still alike."""
    shard = drawn(48, 40)
    finding = examine(stored(torch.cat((shard, shard + drawn(48, 40, seed=1) / 50))))
    assert finding is not None
    assert 0.99 < finding.correlation < 1


def test_two_copies_among_four_are_found() -> None:
    """Not all shards need to be alike."""
    first, second, third = (drawn(48, 40, seed=seed) for seed in range(3))
    finding = examine(stored(torch.cat((first, second, first, third))))
    assert finding is not None
    assert (finding.shards, finding.copies) == (4, (0, 2))


@pytest.mark.parametrize(
    "values",
    [
        drawn(64, 64),
        torch.ones(64, 64),
        torch.zeros(64, 64),
        torch.cat((drawn(64, 64), torch.zeros(64, 64))),
        drawn(64, 64).square() + drawn(1, 64, seed=1).square() * 50,
        drawn(64, 64) + drawn(64, 1, seed=1) * 100 + drawn(1, 64, seed=2) * 100,
        torch.arange(4096).view(64, 64),
        drawn(64),
        drawn(2, 2),
    ],
    ids=["drawn", "ones", "zeros", "padded", "second-moment", "offsets", "integers", "vector", "tiny"],
)
def test_independent_shards_are_left_alone(values: torch.Tensor) -> None:
    """Random, constant and padded tensors, moments, and what has rows in common are no copies."""
    assert examine(stored(values)) is None


def test_moments_are_passed_over() -> None:
    """Optimiser state may be alike for good reasons, early in a run."""
    assert examine(stored(torch.cat([drawn(32, 32)] * 2), "optimizer.exp_avg.w")) is None


def test_files_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    """One safetensors file a rank, as nanotron writes them: equal ones are named."""
    for layer, seeds in (("q_proj", (0, 0)), ("k_proj", (1, 2))):
        (tmp_path / layer).mkdir()
        for rank, seed in enumerate(seeds):
            name = f"model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"
            save_file({"data": drawn(32, 16, seed=seed)}, tmp_path / layer / name)
    result = audit(tmp_path, "--json")
    report = json.loads(result.output)
    assert result.return_value == 1
    assert report["tensors"] == 2
    (copies,) = report["copies"]
    assert copies["tensor"].startswith("q_proj/")
    assert (copies["shards"], copies["copies"]) == (2, [0, 1])


def save_distributed(folder: Path, state: dict[str, object]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp.save(state, checkpoint_id=folder)
    finally:
        dist.destroy_process_group()


def test_distributed_checkpoints(tmp_path: Path) -> None:
    """What torch.distributed.checkpoint wrote is read without executing its pickle, in half precision too."""
    shard = drawn(32, 16).bfloat16()
    save_distributed(tmp_path / "c", {"model": {"bad": torch.cat((shard, shard)), "good": drawn(64, 16)}, "step": 3})
    result = audit(tmp_path / "c")
    assert result.return_value == 1
    assert "model.bad" in result.output
    assert "model.good" not in result.output
    assert "1 of 2 tensors hold copies" in result.output


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    """Metadata that names anything but plain classes is not loaded."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "executed",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(FormatError, match="which plain metadata does not"):
        list(stored_tensors(tmp_path))
    assert not (tmp_path / "executed").exists()


def test_good_weights_are_good(tmp_path: Path) -> None:
    """Safetensors of whole tensors without copies: exit code 0 and how many were examined."""
    save_file({"a": drawn(64, 32), "b": torch.ones(64)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        result = audit(path)
        assert result.return_value == 0
        assert result.output == "2 tensors: no shards are copies of each other\n"


@pytest.mark.parametrize(("content", "text"), [(None, "neither"), (b"no safetensors", "cannot be read")])
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, content: bytes | None, text: str) -> None:
    """An empty folder and a broken file are refused by the command."""
    if content:
        (tmp_path / "m.safetensors").write_bytes(content)
    result = audit(tmp_path)
    assert result.exception is not None
    assert text in str(result.exception.message)  # type: ignore[attr-defined]
