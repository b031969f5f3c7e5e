"""Mixture of experts in every layout: the same routing, losses, gradient norms and checkpoints as on one rank."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from replay_ranks import Fault, run_ranks
from test_trainer_faults import kill_and_resume
from test_trainer_layouts import LAYOUTS, assert_same_run, start, weights
from trainer_world import Run

from opsd.rank_page import read_page

SPARSE: dict[str, object] = {
    "model__experts": 6, "model__experts_per_token": 2, "model__expert_ffn": 14, "model__shared_experts": 1,
    "model__dense_layers": 1, "model__layers": 4, "model__router": "sigmoid", "model__router_normalised": "true",
    "model__router_bias": "true", "optimizer__balance_loss": 0.01, "optimizer__router_z_loss": 1e-3,
    "optimizer__balance_rate": 0.01, "metrics__experts_every": 1,
}  # fmt: skip
FIGURES = ("balance_loss", "router_z_loss", "router_entropy", "router_load")


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Run:
    """Five steps on one rank."""
    return start(tmp_path_factory.mktemp("alone"), shards, {}, **SPARSE, run__steps=5)


def assert_same_routing(run: Run, alone: Run) -> None:
    assert_same_run(run, alone, SPARSE)
    for ours, theirs in zip(run.metrics(), alone.metrics(), strict=True):
        assert [ours[name] for name in FIGURES] == pytest.approx([theirs[name] for name in FIGURES], rel=1e-5)
    assert loads(run) == loads(alone)


def loads(run: Run) -> list[tuple[int, list[list[int]]]]:
    """The tokens of each layer's experts, by step."""
    lines = (run.folder / "experts.jsonl").read_text().splitlines()
    return [(line["step"], line["loads"]) for line in map(json.loads, lines)]


def test_a_run_goes_on_in_any_other_layout(tmp_path: Path, shards: Path, alone: Run) -> None:
    """A step each on two ranks, with split matrices, experts spread over ranks, split layers, and alone: one run.

    Losses, routing, and the biases that were moved in every step are those of one rank.
    """
    layouts: list[tuple[dict[str, int], int]] = [
        ({"dp": 2}, 1),
        ({"tp": 2}, 1),
        ({"dp": 2}, 2),
        ({"pp": 2}, 1),
        ({}, 1),
    ]
    for step, (layout, spread) in enumerate(layouts, start=1):
        run = start(tmp_path, shards, layout, **SPARSE, parallel__ep=spread, run__steps=step)
    assert_same_routing(run, alone)
    page = read_page(run.folder / "rank-0000.page")
    last = run.metrics()[-1]
    assert page.router == (last["router_load"], 6 / 2, last["router_entropy"], 0.0)
    moved = [value for name, value in weights(run, 5, SPARSE).items() if name.endswith("experts.bias")]
    assert len(moved) == 3
    assert all(value.abs().max() > 0 for value in moved)


SPREAD = ({"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "replicas": 2})
"""Layouts with two ranks that share experts; of the second, each pair has two ranks that shard its experts unevenly."""


@pytest.mark.long
@pytest.mark.parametrize("layout", SPREAD, ids=lambda layout: " ".join(f"{name}{n}" for name, n in layout.items()))
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_experts_are_spread_over_ranks(
    tmp_path: Path, shards: Path, alone: Run, layout: dict[str, int], recompute: str
) -> None:
    """Expert parallelism beside any other changes nothing either."""
    settings = SPARSE | {"parallel__ep": 2, "parallel__recompute": recompute, "run__steps": 5}
    assert_same_routing(start(tmp_path, shards, layout, **settings), alone)


@pytest.mark.long
@pytest.mark.parametrize("name", [*LAYOUTS, "dp2 cp2"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layout_changes_nothing(tmp_path: Path, shards: Path, alone: Run, name: str, recompute: str) -> None:
    """Losses, norm, routing and checkpoint are those of one rank, recomputed or not."""
    layout = LAYOUTS.get(name, {"dp": 2, "cp": 2})
    assert_same_routing(start(tmp_path, shards, layout, **SPARSE, run__steps=5, parallel__recompute=recompute), alone)


@pytest.mark.long
def test_killed_ranks_change_no_bit(tmp_path: Path, shards: Path) -> None:
    """Five times killed at random moments, ranks that share experts come to the same losses and the same routing."""
    settings = {name.replace("__", "."): value for name, value in SPARSE.items()} | {"parallel.ep": 2}
    whole, killed = (Run(tmp_path / name, shards, settings) for name in ("whole", "killed"))
    whole.finish()
    kill_and_resume(killed, 5, random.Random(1))
    assert killed.curve() == whole.curve()
    expected = {line["step"]: [line[name] for name in FIGURES] for line in whole.metrics()}
    assert {line["step"]: [line[name] for name in FIGURES] for line in killed.metrics()} == expected


@pytest.mark.long
@pytest.mark.parametrize("module", ["blocks.0.attention.query", "blocks.1.ffn.experts.router"])
def test_a_wrong_bit_names_its_rank(tmp_path: Path, module: str) -> None:
    """Although the wrong value goes on to the ranks that share experts, the rank that computed it is named."""
    sparse = ("parallel.ep=2", "model.experts=4", "model.experts_per_token=2")
    events = run_ranks(tmp_path, 2, sparse, [Fault(what, 1, module) for what in ("activation", "weight", "gradient")])
    assert [(event["step"], event["ranks"]) for event in events] == [(1, [1]), (1001, [1]), (2001, [1])]
