"""Every layout trains the same model: the same initial bits, losses and gradient norms to rounding, any to any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_world import Run, make_small_corpus

from opsd.checkpoints.manifest import folder_of, read
from trainer.config import load as load_config
from trainer.model import Decoder
from trainer.regions import region_of
from trainer.restore import load

SHAPE: dict[str, object] = {
    "model.width": 32, "model.heads": 4, "model.kv_heads": 2, "model.ffn": 50, "model.vocab": 402,
    "optimizer.z_loss": 1e-4, "checkpoint.every": 100,
}  # fmt: skip
TOLERANCE = 2e-4
"""Relative, of losses and gradient norms between layouts after up to five steps, in float32."""

LAYOUTS = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "replicas2": {"replicas": 2},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "pp2 tp2": {"pp": 2, "tp": 2},
    "replicas2 cp2": {"replicas": 2, "cp": 2},
}


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_corpus(tmp_path_factory.mktemp("shards"))


def start(folder: Path, shards: Path, layout: dict[str, int], **settings: object) -> Run:
    """A run in ``layout`` that has ended well."""
    run = Run(folder, shards, SHAPE | {f"parallel.{name}": n for name, n in layout.items() if name != "dp"})
    world = 1
    for size in layout.values():
        world *= size
    codes = run.start(world=world, **settings).wait()
    assert codes == [0] * world, run.printed()
    assert not [event for kind in ("tp_shards_equal", "replicas_differ") for event in run.events(kind)]
    return run


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """Five steps on one rank."""
    return start(tmp_path_factory.mktemp("alone"), shards, {}, run__steps=5)


def weights(run: Run, step: int) -> dict[str, torch.Tensor]:
    """The whole parameters and moments in a checkpoint, from the files of all ranks."""
    settings = load_config(str(run.folder / "config.toml"), [f"{k}={v}" for k, v in SHAPE.items()] + ["data.shards=x"])
    model = Decoder(settings.model)
    state = {
        f"{kind}.{name}": region_of(torch.empty_like(value))
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for name, value in model.named_parameters()
    }
    folder = folder_of(run.checkpoints, step)
    load(folder, read(folder), state)
    return {name: region.local for name, region in state.items()}


def assert_same_curve(run: Run, other: Run) -> None:
    ours, theirs = run.curve(), other.curve()
    assert ours.keys() == theirs.keys()
    for step, point in ours.items():
        assert point == pytest.approx(theirs[step], rel=TOLERANCE), step


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_nothing(tmp_path: Path, shards: Path, alone: Run, name: str) -> None:
    """Loss and gradient norm are those of one rank, and so are the parameters and moments in the checkpoint."""
    run = start(tmp_path, shards, LAYOUTS[name], run__steps=5)
    assert_same_curve(run, alone)
    for tensor, value in weights(run, 5).items():
        torch.testing.assert_close(value, weights(alone, 5)[tensor], rtol=1e-2, atol=2e-4, msg=tensor)
