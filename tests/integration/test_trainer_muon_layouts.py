"""Muon in every layout: matrices are orthogonalised whole, wherever their parts are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_trainer_faults import kill_and_resume
from test_trainer_layouts import LAYOUTS, assert_same_curve, start
from trainer_world import Run

MUON: dict[str, object] = {"optimizer__kind": "muon", "optimizer__embedding_decay": 0.1}
SPARSE: dict[str, object] = {"model__experts": 6, "model__experts_per_token": 2, "model__expert_ffn": 14}


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """Five steps on one rank."""
    return start(tmp_path_factory.mktemp("alone"), shards, {}, **MUON, run__steps=5)


def test_a_run_goes_on_in_any_other_layout(tmp_path: Path, shards: Path, alone: Run) -> None:
    """Its momentum goes on as well: the losses are those of one rank."""
    for step, layout in enumerate(({"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2}, {"replicas": 2}, {}), start=1):
        run = start(tmp_path, shards, layout, **MUON, run__steps=step)
    assert_same_curve(run, alone)


@pytest.mark.long
@pytest.mark.parametrize("name", [*LAYOUTS, "dp4"])
def test_a_layout_changes_nothing(tmp_path: Path, shards: Path, alone: Run, name: str) -> None:
    """Losses and norms are those of one rank."""
    layout = {part[:-1]: int(part[-1]) for part in name.split()}
    assert_same_curve(start(tmp_path, shards, layout, **MUON, run__steps=5), alone)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "replicas": 2}, {"dp": 2, "pp": 2}], ids=str
)
def test_experts_that_are_spread(tmp_path: Path, shards: Path, layout: dict[str, int]) -> None:
    """Each expert is orthogonalised by itself, with expert parallelism too."""
    settings = MUON | SPARSE | {"run__steps": 4}
    whole = start(tmp_path / "alone", shards, {}, **settings)
    assert_same_curve(start(tmp_path / "spread", shards, layout, **settings, parallel__ep=2), whole)


@pytest.mark.long
def test_killed_ranks_change_no_bit(tmp_path: Path, shards: Path) -> None:
    """Five times killed at random moments, the ranks come to the same losses."""
    settings = {name.replace("__", "."): value for name, value in MUON.items()}
    whole, killed = (Run(tmp_path / name, shards, settings) for name in ("whole", "killed"))
    whole.finish()
    kill_and_resume(killed, 5, random.Random(1))
    assert killed.curve() == whole.curve()
