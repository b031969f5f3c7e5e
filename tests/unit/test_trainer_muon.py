"""Muon: what it orthogonalises, how it spreads the work, and torch's own as the reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opsd.plan.plan import checkpoint_bytes
from opsd.trainer.config import load
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.muon import Muon, _spread, is_orthogonalised, orthogonalised
from opsd.trainer.optimizer import Optimizer
from opsd.trainer.regions import Region
from opsd.trainer.settings import OptimizerSettings

torch.set_num_threads(1)

SHAPE = ModelSettings(
    layers=2, width=16, heads=2, kv_heads=1, ffn=24, vocab=10, experts=3, experts_per_token=2, dense_layers=1
)


def make(**settings: object) -> tuple[Decoder, Optimizer]:
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    return model, Optimizer(model, OptimizerSettings(lr=0.1, kind="muon", **settings))


def draw_gradients(model: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def values_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("shape", [(1, 20, 8), (2, 8, 20), (3, 9, 9)])
def test_singular_values_become_one(shape: tuple[int, ...]) -> None:
    """All of them are near 1, with the same singular vectors, although they were a thousand times apart."""
    left, _, right = torch.linalg.svd(
        torch.randn(shape, generator=torch.Generator().manual_seed(1)), full_matrices=False
    )
    spread = torch.logspace(0, -3, left.shape[-1])
    found = orthogonalised(left @ torch.diag(spread) @ right)
    around = left.mT @ found @ right.mT
    kept = spread > 0.01
    diagonal = around.diagonal(dim1=-2, dim2=-1)[..., kept]
    assert ((diagonal > 0.6) & (diagonal < 1.3)).all()
    assert (around - torch.diag_embed(around.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-3


def test_nothing_stays_nothing() -> None:
    """An expert that no token was sent to is not moved."""
    assert not orthogonalised(torch.zeros(2, 4, 6)).any()


def test_it_is_torchs_muon() -> None:
    """Three updates are those of torch.optim.Muon, up to bfloat16, in which that one orthogonalises."""
    generator = torch.Generator().manual_seed(0)
    ours = {"blocks.0.x": torch.nn.Parameter(torch.randn(12, 20, generator=generator))}
    theirs = ours["blocks.0.x"].detach().clone().requires_grad_()
    reference = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    region = Region(ours["blocks.0.x"].detach(), (12, 20), (0, 0))
    muon = Muon(ours, {"blocks.0.x": region}, None, torch.bfloat16)
    for _ in range(3):
        gradient = torch.randn(12, 20, generator=generator)
        ours["blocks.0.x"].grad, theirs.grad = gradient.clone(), gradient
        muon.update(0.1, 0.3, 0.95)
        reference.step()
    torch.testing.assert_close(ours["blocks.0.x"], theirs, rtol=0, atol=1e-3)


def test_layers_by_muon_and_the_rest_by_adamw() -> None:
    """Matrices of layers move by the size of AdamW's updates; embeddings and norms exactly as AdamW moves them."""
    model, optimizer = make(weight_decay=0.0, clip=1e9)
    before = values_of(model)
    draw_gradients(model, 1)
    optimizer.update(0.1, math.sqrt(optimizer.take_gradients().item()))
    for name, value in model.named_parameters():
        moved = (value.detach() - before[name]) / 0.1
        if is_orthogonalised(name, value):
            assert moved.square().mean().sqrt() == pytest.approx(0.2, rel=0.3), name
            assert set(optimizer.moments(name)) == {"exp_avg"}
        else:
            torch.testing.assert_close(moved.abs(), torch.ones_like(moved))
            assert set(optimizer.moments(name)) == {"exp_avg", "exp_avg_sq"}


def test_preflight_knows_the_size_of_the_state() -> None:
    """Memory and disk are predicted with one moment less for matrices of layers."""
    config = load("tiny", ["data.shards=/data", "optimizer.kind=muon"], {})
    model = Decoder(config.model)
    optimizer = Optimizer(model, config.optimizer)
    state = [moment for name in optimizer.shards for moment in optimizer.moments(name).values()]
    numbers = sum(value.numel() for value in (*model.parameters(), *state))
    assert checkpoint_bytes(config) == pytest.approx(4 * numbers, rel=1e-3)


def test_each_expert_is_a_matrix_of_its_own() -> None:
    """An expert with greater gradients does not change the updates of the others."""
    found = []
    for factor in (1.0, 100.0):
        model, optimizer = make(clip=1e9)
        draw_gradients(model, 1)
        weight = model.blocks["1"].ffn.experts.networks.up.weight
        weight.grad[2] *= factor
        optimizer.update(0.1, math.sqrt(optimizer.take_gradients().item()))
        found.append(weight.detach())
    torch.testing.assert_close(*found)


def test_decay_of_embeddings_is_their_own() -> None:
    """With zero gradients only weight decay moves a parameter."""
    model, optimizer = make(weight_decay=0.5, embedding_decay=0.2)
    before = values_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.update(0.1, math.sqrt(optimizer.take_gradients().item()))
    for name, value in model.named_parameters():
        decay = 0.2 if name.startswith("embedding") else 0.0 if value.dim() == 1 else 0.5
        torch.testing.assert_close(value.detach(), before[name] * (1 - 0.1 * decay))


@given(rows=st.integers(1, 9), columns=st.integers(1, 5), experts=st.integers(1, 4), ranks=st.integers(1, 5))
def test_work_is_spread_and_every_element_comes_once(rows: int, columns: int, experts: int, ranks: int) -> None:
    """The pieces of the first holders cover each matrix once; no rank has more than a matrix more than another."""
    shapes = {"matrix": (rows, columns), "copied": (rows, columns), "experts": (experts, rows, columns)}
    held = [
        {
            "matrix": ((begin := rows * rank // ranks, 0), (rows * (rank + 1) // ranks - begin, columns), True),
            "copied": ((0, 0), (rows, columns), rank == 0),
            "experts": (
                (first := experts * rank // ranks, 0, 0), (experts * (rank + 1) // ranks - first, rows, columns), True
            ),
        }
        for rank in range(ranks)
    ]  # fmt: skip
    matrices = _spread(shapes, held)
    assert [(matrix.name, matrix.number) for matrix in matrices] == [
        ("matrix", 0), ("copied", 0), *(("experts", number) for number in range(experts)),
    ]  # fmt: skip
    for matrix in matrices:
        covered = torch.zeros(matrix.shape)
        for piece in matrix.pieces:
            covered[piece.slices] += piece.first
        assert (covered == 1).all()
    each = [sum(matrix.owner == rank for matrix in matrices) for rank in range(ranks)]
    assert max(each) - min(each) <= 1
    assert [len(matrix.pieces) for matrix in matrices if matrix.name == "copied"] == [ranks]


def test_a_state_belongs_to_its_optimizer() -> None:
    """A checkpoint of AdamW is refused by a run with Muon; one of before there was a choice is AdamW's."""
    shards = {".": "x"}
    digests = []
    for kind in ("adamw", "muon"):
        config = load("tiny", ["data.shards=/data", f"optimizer.kind={kind}"], {})
        digests.append(config.digest(config.data.mix({".": 100}, 1), shards, 8))
    assert digests[0] != digests[1]
