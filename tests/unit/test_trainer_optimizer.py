"""AdamW, Muon and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opsd.plan.plan import checkpoint_bytes
from opsd.trainer.config import load
from opsd.trainer.model import Decoder
from opsd.trainer.model_settings import ModelSettings
from opsd.trainer.optimizer import Muon, Optimizer, _spread, is_orthogonalised, orthogonalised
from opsd.trainer.regions import Region
from opsd.trainer.settings import OptimizerSettings, ScheduleSettings
from opsd.trainer.train import rate_factor

# AdamW on plain tensors: what decays, what is clipped, what happens to gradients that are not finite.


torch.set_num_threads(1)  # threads cost more than they bring for matrices this small

SHAPE = ModelSettings(layers=1, width=8, heads=2, kv_heads=1, ffn=16, vocab=10)


def make(**settings: float) -> tuple[Decoder, Optimizer]:
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    return model, Optimizer(model, OptimizerSettings(lr=0.1, **settings))


def fill_gradients(model: Decoder, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def copy(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_embeddings_and_norms_do_not_decay() -> None:
    """With zero gradients only weight decay moves a parameter, and only the matrices of the layers move."""
    model, optimizer = make(weight_decay=0.5)
    before = copy(model)
    fill_gradients(model, 0.0)
    assert optimizer.update(0.1, math.sqrt(optimizer.take_gradients().item()))
    for name, value in model.named_parameters():
        factor = 1.0 if name.startswith("embedding") or "norm" in name else 1 - 0.1 * 0.5
        torch.testing.assert_close(value.detach(), before[name] * factor)


def test_the_norm_is_over_all_parameters() -> None:
    """The squared norm counts every element of every gradient once, and the model's gradients are gone after it."""
    model, optimizer = make()
    fill_gradients(model, 2.0)
    count = sum(p.numel() for p in model.parameters())
    assert optimizer.take_gradients().item() == pytest.approx(4.0 * count)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("gradient", "clip", "seen"), [(2.0, 1e9, 2.0), (2.0, 1.0, None)])
def test_gradients_are_clipped_to_the_limit(gradient: float, clip: float, seen: float | None) -> None:
    """The first moment shows the gradient that AdamW saw: as it was, or scaled to the norm ``clip``."""
    model, optimizer = make(clip=clip)
    fill_gradients(model, gradient)
    norm = math.sqrt(optimizer.take_gradients().item())
    optimizer.update(0.1, norm)
    expected = (1 - 0.9) * (seen or gradient * clip / norm)
    for name, _ in model.named_parameters():
        moment = optimizer.moments(name)["exp_avg"]
        torch.testing.assert_close(moment, torch.full_like(moment, expected))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_gradients_that_are_not_finite_change_nothing(norm: float) -> None:
    """NaN or infinity in a gradient is refused: parameters, moments and the count of updates stay as they were."""
    model, optimizer = make()
    before = copy(model)
    fill_gradients(model, math.nan)
    assert math.isnan(optimizer.take_gradients().item())
    assert not optimizer.update(0.1, norm)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])
        assert not optimizer.moments(name)["exp_avg"].any()
    assert optimizer.updates == 0


def test_it_is_adamw() -> None:
    """Three updates give what torch's own unfused AdamW gives."""
    model, optimizer = make(weight_decay=0.0, clip=1e9)
    peer = Decoder(SHAPE)
    peer.load_state_dict(model.state_dict())
    reference = torch.optim.AdamW(peer.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, fused=False)
    for step in range(3):
        for module in (model, peer):
            fill_gradients(module, 0.1 * (step + 1))
        optimizer.update(0.1, math.sqrt(optimizer.take_gradients().item()))
        reference.step()
    for one, other in zip(model.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(one, other)


# Muon: what it orthogonalises, how it spreads the work, and torch's own as the reference.


torch.set_num_threads(1)

MUON = ModelSettings(
    layers=2, width=16, heads=2, kv_heads=1, ffn=24, vocab=10, experts=3, experts_per_token=2, dense_layers=1
)


def muon_of(**settings: object) -> tuple[Decoder, Optimizer]:
    torch.manual_seed(0)
    model = Decoder(MUON)
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
    model, optimizer = muon_of(weight_decay=0.0, clip=1e9)
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
        model, optimizer = muon_of(clip=1e9)
        draw_gradients(model, 1)
        weight = model.blocks["1"].ffn.experts.networks.up.weight
        weight.grad[2] *= factor
        optimizer.update(0.1, math.sqrt(optimizer.take_gradients().item()))
        found.append(weight.detach())
    torch.testing.assert_close(*found)


def test_decay_of_embeddings_is_their_own() -> None:
    """With zero gradients only weight decay moves a parameter."""
    model, optimizer = muon_of(weight_decay=0.5, embedding_decay=0.2)
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


# The learning-rate schedule.


SCHEDULE = ScheduleSettings(warmup=10, decay_start=100, decay_end=120)


@pytest.mark.parametrize(
    ("step", "factor"), [(1, 0.1), (10, 1.0), (11, 1.0), (100, 1.0), (101, 0.95), (110, 0.5), (120, 0.0), (500, 0.0)]
)
def test_phases(step: int, factor: float) -> None:
    """Linear up to the end of the warm-up, flat, linear down to 0 at the end of the decay."""
    assert rate_factor(step, SCHEDULE) == pytest.approx(factor)


@given(step=st.integers(1, 200), extension=st.integers(0, 10**6))
def test_extension_leaves_the_past_alone(step: int, extension: int) -> None:
    """Moving the decay of a run that is extended changes no step before the old decay."""
    moved = SCHEDULE.model_copy(
        update={"decay_start": SCHEDULE.decay_start + extension, "decay_end": SCHEDULE.decay_end + extension}
    )
    if step <= SCHEDULE.decay_start:
        assert rate_factor(step, moved) == rate_factor(step, SCHEDULE)


def test_no_warmup() -> None:
    """Without warm-up the first step has the full rate."""
    assert rate_factor(1, ScheduleSettings(warmup=0, decay_start=5, decay_end=6)) == 1.0


@pytest.mark.parametrize(
    ("step", "factor"), [(5, 0.5), (10, 1.0), (110, 0.55), (210, 0.1), (10_000, 0.1), (60, 0.1 + 0.9 * 0.853553)]
)
def test_cosine(step: int, factor: float) -> None:
    """Half a cosine from the end of the warm-up down to the floor, at which it stays."""
    cosine = ScheduleSettings(kind="cosine", warmup=10, decay_end=210, floor=0.1)
    assert rate_factor(step, cosine) == pytest.approx(factor)


@pytest.mark.parametrize(("step", "factor"), [(5, 0.5), (99, 1.0), (100, 0.1), (199, 0.1), (200, 0.01), (999, 0.01)])
def test_multi_step(step: int, factor: float) -> None:
    """Constant between milestones, a tenth from each on."""
    steps = ScheduleSettings(kind="multi-step", warmup=10, milestones=(100, 200))
    assert rate_factor(step, steps) == pytest.approx(factor)


def test_floor_of_the_decay() -> None:
    """WSD ends at the floor where one is set."""
    floored = SCHEDULE.model_copy(update={"floor": 0.2})
    assert [rate_factor(step, floored) for step in (110, 120, 500)] == pytest.approx([0.6, 0.2, 0.2])


@pytest.mark.parametrize(
    ("decay", "factors"), [("linear", [0.75, 0.5, 0.25]), ("1-sqrt", [0.5, 0.292893, 0.133975]),
                           ("cosine", [0.853553, 0.5, 0.146447])],
)  # fmt: skip
def test_shapes_of_the_decay(decay: Literal["linear", "1-sqrt", "cosine"], factors: list[float]) -> None:
    """A quarter, half and three quarters into the decay, between the same ends."""
    schedule = SCHEDULE.model_copy(update={"decay": decay})
    assert [rate_factor(step, schedule) for step in (105, 110, 115)] == pytest.approx(factors, abs=1e-6)
    assert [rate_factor(step, schedule) for step in (10, 100, 120, 500)] == [1.0, 1.0, 0.0, 0.0]


def test_only_wsd_has_a_shape() -> None:
    """A shape beside a schedule that has its own is refused."""
    problem = ScheduleSettings(kind="cosine", warmup=1, decay_end=9, decay="1-sqrt").problem()
    assert problem == "schedule.decay 1-sqrt needs schedule.kind wsd"
