"""Schedules of a pipeline, with stages of any size: the same losses, norms and checkpoints as on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_trainer_layouts import assert_same_curve, assert_same_run, start
from trainer_world import Run

LAYERS: dict[str, object] = {"model__layers": 5, "model__nope_every": 3}
SCHEDULES: dict[str, dict[str, object]] = {
    "uneven": {"parallel__stage_layers": "[4, 1]"},
    "interleaved": {"parallel__schedule": "interleaved", "parallel__stages_per_rank": 2},
    "zero-bubble": {"parallel__schedule": "zero-bubble"},
    "zero-bubble x 2": {"parallel__schedule": "zero-bubble", "parallel__stages_per_rank": 2},
}


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """Five steps on one rank."""
    return start(tmp_path_factory.mktemp("alone"), shards, {}, **LAYERS, run__steps=5)


def test_a_run_goes_on_with_any_other_schedule(tmp_path: Path, shards: Path, alone: Run) -> None:
    """A step with each, and one on one rank: one run."""
    for step, schedule in enumerate((*SCHEDULES.values(), {}), start=1):
        layout = {"pp": 2} if schedule else {}
        run = start(tmp_path, shards, layout, **LAYERS, **schedule, run__steps=step)
    assert_same_run(run, alone, LAYERS)


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}, {"cp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_schedule_changes_nothing(
    tmp_path: Path, shards: Path, alone: Run, name: str, layout: dict[str, int], recompute: str
) -> None:
    """Beside every other way to spread a model, recomputed or not."""
    if "zero" in name and recompute == "selective":
        pytest.skip("refused")
    settings = LAYERS | SCHEDULES[name] | {"run__steps": 5, "parallel__recompute": recompute}
    assert_same_run(start(tmp_path, shards, layout, **settings), alone, LAYERS)


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_with_experts_and_untied(tmp_path: Path, shards: Path, name: str) -> None:
    """What routers measure and add to gradients is counted once, also where a backward pass is in two halves."""
    sparse = LAYERS | {
        "model__experts": 4, "model__experts_per_token": 2, "model__expert_ffn": 14, "model__tied": "false",
        "optimizer__balance_loss": 0.01, "optimizer__router_z_loss": 1e-3, "run__steps": 4,
    }  # fmt: skip
    whole = start(tmp_path / "alone", shards, {}, **sparse)
    spread = start(tmp_path / "spread", shards, {"pp": 2}, **sparse, **SCHEDULES[name])
    assert_same_curve(spread, whole)
    figures = ("balance_loss", "router_z_loss", "router_load")
    for ours, theirs in zip(spread.metrics(), whole.metrics(), strict=True):
        assert [ours[key] for key in figures] == pytest.approx([theirs[key] for key in figures], rel=1e-5)
