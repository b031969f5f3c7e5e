"""Layers with a state in every layout: the same losses, gradient norms and checkpoints as on one rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_trainer_faults import kill_and_resume
from test_trainer_layouts import LAYOUTS, assert_same_curve, assert_same_run, start
from trainer_world import Run

HYBRID: dict[str, object] = {
    "model__layers": 4, "model__pattern": '["mamba", "global", "delta", "delta"]', "model__state_heads": 4,
    "model__state_key_heads": 2, "model__state_key_dim": 6, "model__state_value_dim": 10,
    "model__state_conv_bias": "true", "data__sequence": 96,
}  # fmt: skip
"""More than a chunk, and no whole number of them."""


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """Five steps on one rank."""
    return start(tmp_path_factory.mktemp("alone"), shards, {}, **HYBRID, run__steps=5)


def test_a_run_goes_on_in_any_other_layout(tmp_path: Path, shards: Path, alone: Run) -> None:
    """A step each on two ranks that share parameters, heads and layers, on four, and alone: one run."""
    for step, layout in enumerate(({"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}, {}), start=1):
        run = start(tmp_path, shards, layout, **HYBRID, run__steps=step)
    assert_same_run(run, alone, HYBRID)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "cp" not in name])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_layout_changes_nothing(tmp_path: Path, shards: Path, alone: Run, name: str, recompute: str) -> None:
    """Losses, norm and checkpoint are those of one rank, recomputed or not."""
    assert_same_run(
        start(tmp_path, shards, LAYOUTS[name], **HYBRID, run__steps=5, parallel__recompute=recompute), alone, HYBRID
    )


@pytest.mark.long
def test_with_muon_and_experts(tmp_path: Path, shards: Path) -> None:
    """Gates, positions in some channels, and states, whose matrices are orthogonalised but not their convolutions."""
    settings = HYBRID | {
        "model__experts": 6, "model__experts_per_token": 2, "model__expert_ffn": 14, "model__shared_experts": 1,
        "model__shared_gate": "true", "model__attention_gate": "true", "model__rope_dim": 4, "optimizer__kind": "muon",
        "run__steps": 4,
    }  # fmt: skip
    whole = start(tmp_path / "alone", shards, {}, **settings)
    assert_same_curve(start(tmp_path / "spread", shards, {"dp": 2, "tp": 2}, **settings, parallel__ep=2), whole)


@pytest.mark.long
def test_killed_ranks_change_no_bit(tmp_path: Path, shards: Path) -> None:
    """Five times killed at random moments, the ranks come to the same losses."""
    settings = {name.replace("__", "."): value for name, value in HYBRID.items()} | {
        "model.layers": 2, "model.pattern": '["mamba", "delta"]', "data.sequence": 32,
    }  # fmt: skip
    whole, killed = (Run(tmp_path / name, shards, settings) for name in ("whole", "killed"))
    whole.finish()
    kill_and_resume(killed, 5, random.Random(1))
    assert killed.curve() == whole.curve()
