"""How layers are divided among the stages of a pipeline, and what cannot be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.trainer.accumulate import micro_batches
from opsd.trainer.config import Config, ConfigError, load
from opsd.trainer.counts import flops_per_token, layer_flops
from opsd.trainer.stages import divide, stage_ranges


def config(*overrides: str, preset: str = "tiny") -> Config:
    return load(preset, ["data.shards=/data", "data.micro_batch=1", *overrides], {})


@settings(max_examples=50, deadline=None)
@given(costs=st.lists(st.integers(1, 9), min_size=1, max_size=9), parts=st.integers(1, 9))
def test_no_division_has_a_faster_slowest_stage(costs: list[int], parts: int) -> None:
    """Compared with every other one; each stage has a layer at least, and all are in order."""
    parts = min(parts, len(costs))
    counts = divide(costs, parts)
    assert (len(counts), sum(counts), min(counts) > 0) == (parts, len(costs), True)

    def slowest(ends: tuple[int, ...]) -> int:
        return max(sum(costs[begin:end]) for begin, end in itertools.pairwise((0, *ends, len(costs))))

    every = itertools.combinations(range(1, len(costs)), parts - 1)
    assert slowest(tuple(itertools.accumulate(counts[:-1]))) == min(map(slowest, every))


def test_the_output_projection_is_worth_layers() -> None:
    """SmolLM3's costs as much as nearly three layers, so the last of four stages has fewer."""
    run = load("smollm3-3b", ["data.shards=/data", "parallel.pp=4"], {})
    assert [len(layers) for layers in stage_ranges(run.model, run.parallel, 4096)] == [9, 10, 10, 7]
    own = load("smollm3-3b", ["data.shards=/data", "parallel.pp=2", "parallel.stage_layers=[20, 16]"], {})
    assert stage_ranges(own.model, own.parallel, 4096) == [range(20), range(20, 36)]


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe", "tiny-mla", "tiny-hybrid"])
def test_layers_cost_what_the_model_costs(preset: str) -> None:
    """The layers, the last norm and the output projection are all of it."""
    model = config(preset=preset).model
    whole = sum(layer_flops(model, layer, 256) for layer in range(model.layers)) + 6 * model.width * (model.vocab + 1)
    assert whole == pytest.approx(flops_per_token(model, 256))


@pytest.mark.parametrize(("overrides", "expected"), [
    (["parallel.schedule=zero-bubble"], "parallel.schedule needs parallel.pp above 1"),
    (["parallel.stages_per_rank=2"], "parallel.stages_per_rank needs parallel.pp above 1"),
    (["parallel.pp=2", "parallel.schedule=interleaved"], "needs parallel.stages_per_rank above 1"),
    (["parallel.pp=2", "parallel.stages_per_rank=2"], "needs parallel.schedule interleaved or zero-bubble"),
    (["parallel.pp=2", "parallel.stage_layers=[3, 2]"], "needs 2 numbers with the sum of model.layers 4"),
    (["parallel.pp=8"], "makes 8 stages, more than model.layers 4"),
    (
        ["parallel.pp=2", "parallel.schedule=zero-bubble", "parallel.compile=true"],
        "parallel.schedule zero-bubble does not work with parallel.compile",
    ),
    (
        ["parallel.pp=2", "parallel.schedule=zero-bubble", "parallel.recompute=selective"],
        "zero-bubble does not work with parallel.recompute selective; take none or full",
    ),
])  # fmt: skip
def test_what_cannot_be_is_refused(overrides: list[str], expected: str) -> None:
    """In one sentence."""
    with pytest.raises(ConfigError, match="parallel") as error:
        config(*overrides)
    assert expected in str(error.value)


def test_rounds_have_to_come_out_even() -> None:
    """Schedules with rounds need a whole number of micro-batches in each."""
    zero = ("parallel.pp=2", "parallel.schedule=zero-bubble")
    assert list(micro_batches(config("data.batch=6", *zero), 2).values()) == [6]
    with pytest.raises(ConfigError, match="cannot divide into 2 rounds"):
        micro_batches(config("data.batch=5", *zero), 2)
