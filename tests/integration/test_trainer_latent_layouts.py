"""Latent attention in every layout: the same losses, gradient norms and checkpoints as on one rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_trainer_faults import kill_and_resume
from test_trainer_layouts import LAYOUTS, assert_same_curve, assert_same_run, start
from trainer_world import Run

LATENT: dict[str, object] = {
    "model__kv_heads": 4, "model__head_dim": 10, "model__kv_rank": 11, "model__query_rank": 13, "model__rope_dim": 4,
    "model__value_dim": 7, "model__qkv_bias": "true", "model__yarn_factor": 2.0, "model__yarn_positions": 16,
    "model__yarn_scores": 0.7,
}  # fmt: skip


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """Five steps on one rank."""
    return start(tmp_path_factory.mktemp("alone"), shards, {}, **LATENT, run__steps=5)


def test_a_run_goes_on_in_any_other_layout(tmp_path: Path, shards: Path, alone: Run) -> None:
    """A step each on two ranks that share parameters, heads, layers and sequences, and alone: one run."""
    for step, layout in enumerate(({"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {}), start=1):
        run = start(tmp_path, shards, layout, **LATENT, run__steps=step)
    assert_same_run(run, alone, LATENT)


@pytest.mark.long
@pytest.mark.parametrize("name", [*LAYOUTS, "dp2 cp2", "tp2 cp2"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_layout_changes_nothing(tmp_path: Path, shards: Path, alone: Run, name: str, recompute: str) -> None:
    """Losses, norm and checkpoint are those of one rank, recomputed or not."""
    layout = {part[:-1]: int(part[-1]) for part in name.split()}
    assert_same_run(
        start(tmp_path, shards, layout, **LATENT, run__steps=5, parallel__recompute=recompute), alone, LATENT
    )


@pytest.mark.long
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=["tp2", "dp2 tp2"])
def test_queries_of_full_rank(tmp_path: Path, shards: Path, layout: dict[str, int]) -> None:
    """Queries that are computed from the input, as in DeepSeek-V2-Lite, train alike with split matrices."""
    settings = LATENT | {"model__query_rank": 0, "model__norms": "after", "run__steps": 3}
    whole = start(tmp_path / "alone", shards, {}, **settings)
    assert_same_curve(start(tmp_path / "split", shards, layout, **settings), whole)


@pytest.mark.long
def test_with_experts_in_groups(tmp_path: Path, shards: Path) -> None:
    """DeepSeek-V3 whole: its attention beside experts in groups, which are spread over ranks."""
    settings = LATENT | {
        "model__experts": 8, "model__experts_per_token": 3, "model__expert_ffn": 14, "model__shared_experts": 1,
        "model__router_groups": 4, "model__groups_per_token": 2, "model__router": "sigmoid",
        "model__router_bias": "true", "optimizer__balance_rate": 0.01, "run__steps": 4,
    }  # fmt: skip
    whole = start(tmp_path / "alone", shards, {}, **settings)
    spread = start(tmp_path / "spread", shards, {"dp": 2, "tp": 2}, **settings, parallel__ep=2)
    assert_same_curve(spread, whole)


@pytest.mark.long
def test_killed_ranks_change_no_bit(tmp_path: Path, shards: Path) -> None:
    """Five times killed at random moments, the ranks come to the same losses."""
    settings = {name.replace("__", "."): value for name, value in LATENT.items()} | {
        "model.heads": 4, "model.width": 32, "parallel.tp": 2, "model.vocab": 402,
    }  # fmt: skip
    whole, killed = (Run(tmp_path / name, shards, settings) for name in ("whole", "killed"))
    whole.finish()
    kill_and_resume(killed, 5, random.Random(1))
    assert killed.curve() == whole.curve()
