"""The memory of a plan against what torch holds: exact for the state, within 5 % for activations."""

from __future__ import annotations

import pytest
import torch

from opsd.plan.layout import Layout
from opsd.plan.memory import half_bytes, kept_bytes, memory_of
from opsd.trainer.config import Config, load
from tests.fakes.live_memory import activation_bytes, rank_of, state_bytes

torch.set_num_threads(1)  # threads cost more than they bring for matrices this small

LAYOUTS = [
    ("tiny", 1, ()),
    ("tiny", 4, ()),
    ("tiny", 4, ("parallel.tp=2",)),
    ("tiny", 8, ("parallel.tp=2", "parallel.replicas=2")),
    ("tiny", 4, ("parallel.cp=2",)),
    ("tiny-moe", 4, ("parallel.tp=2",)),
    ("tiny-mla", 4, ("parallel.tp=2",)),
    ("tiny-hybrid", 1, ()),
    ("tiny-hybrid", 4, ("parallel.tp=2",)),
]


FUSED = {"tiny": (), "tiny-moe": (), "tiny-hybrid": (), "tiny-mla": ("model.value_dim=48",)}
"""The CPU has a fused kernel of attention only for values as large as keys."""


def config(preset: str, *overrides: str) -> Config:
    return load(preset, ["data.shards=/data", "run.device=cpu", "model.document_mask=false", *overrides], environ={})


@pytest.mark.parametrize(("preset", "ranks", "overrides"), LAYOUTS)
def test_the_state_is_what_a_rank_holds(preset: str, ranks: int, overrides: tuple[str, ...]) -> None:
    """Weights and moments, to the byte; gradients are as large as weights."""
    run = config(preset, *overrides)
    predicted = memory_of(run, Layout.of(run), ranks)
    with rank_of(run, ranks) as (model, _):
        held = state_bytes(model, run)
    assert {"weights": predicted.weights, "optimizer": predicted.optimizer} == held
    assert predicted.gradients == predicted.weights


@pytest.mark.parametrize("overrides", [("parallel.pp=2",), ("optimizer.kind=muon",)])
def test_the_state_is_nearly_so_where_it_is_uneven(overrides: tuple[str, ...]) -> None:
    """Stages have different ends, and Muon leaves norms to AdamW: within 1 %."""
    run = config("tiny", *overrides)
    predicted = memory_of(run, Layout.of(run), 4)
    with rank_of(run, 4) as (model, _):
        held = state_bytes(model, run)
    assert predicted.weights == pytest.approx(held["weights"], rel=0.01)
    assert predicted.optimizer == pytest.approx(held["optimizer"], rel=0.01)


def of_cpu(run: Config, layout: Layout) -> int:
    """Bytes that the CPU's kernels keep and those of a GPU do not: of each norm also its result before the weight."""
    model, tokens = run.model, run.data.micro_batch * run.data.sequence
    if layout.tp > 1:
        return 0
    latents = (model.query_rank + model.kv_rank) * model.layers
    heads = model.kinds.count("delta") * model.state_value_width
    norms = 2 * model.layers * model.width + latents + heads if layout.recompute == "none" else 0
    return (model.width + norms) * tokens * half_bytes(model)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("preset", "ranks", "tp"), [
    ("tiny", 1, 1), ("tiny", 4, 2), ("tiny-moe", 1, 1), ("tiny-moe", 4, 2), ("tiny-mla", 1, 1),
    ("tiny-hybrid", 1, 1), ("tiny-hybrid", 4, 2),
])  # fmt: skip
def test_activations_are_what_a_pass_leaves(preset: str, ranks: int, tp: int, recompute: str) -> None:
    """Between the passes, with what the loss keeps for the gradients of its input and of the projection."""
    run = config(preset, f"parallel.tp={tp}", f"parallel.recompute={recompute}", *FUSED[preset])
    layout, model = Layout.of(run), run.model
    tokens = run.data.micro_batch * run.data.sequence
    loss = (tokens + model.vocab / tp) * model.width * half_bytes(model)
    rotation = 2 * 4 * model.head_channels * run.data.sequence
    with rank_of(run, ranks) as (decoder, _):
        held = activation_bytes(decoder, run)
    assert kept_bytes(run, layout, 1) + of_cpu(run, layout) + loss + rotation == pytest.approx(held, rel=0.05)


def test_only_the_first_stage_has_all_micro_batches_in_flight() -> None:
    """The second of two keeps more of each, with its experts, and one of them at a time."""
    run = config("tiny-moe", "parallel.pp=2", "model.layers=8", "model.dense_layers=4", "model.vocab=512")
    layout = Layout.of(run)
    one, two, many = (kept_bytes(run, layout, count) for count in (1, 2, 8))
    assert one < two == many < 1.9 * one
