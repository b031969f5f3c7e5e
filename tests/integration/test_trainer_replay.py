"""A micro-batch that is computed again: planted faults are found and their rank is named; the training is unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from replay_ranks import Fault, run_ranks
from test_trainer_layouts import LAYOUTS, start, weights

FAULTS = ("activation", "weight", "gradient")
TP, CP, PP = "parallel.tp=2", "parallel.cp=2", "parallel.pp=2"


@pytest.mark.parametrize(
    ("world", "layout", "module", "verdict"),
    [
        (1, (), "blocks.1.ffn.up", "unknown"),
        (2, (), "blocks.0.attention.query", "gpu"),
        (2, ("parallel.replicas=2",), "head", "gpu"),
        (2, (TP,), "blocks.0.ffn.down", "unknown"),
        (2, (TP, "parallel.recompute=full"), "blocks.1.attention_norm", "unknown"),
        (2, (PP,), "blocks.1.ffn.up", "unknown"),
        (2, (CP,), "blocks.0.attention.key", "unknown"),
        (4, (TP,), "blocks.1.attention.output", "gpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_one_wrong_bit_is_found_at_once_and_names_its_rank(
    tmp_path: Path, world: int, layout: tuple[str, ...], module: str, verdict: str
) -> None:
    """In an activation, in the copy of a weight, in a gradient; a second data-parallel rank proves that it is a GPU."""
    wrong = world - 1
    events = run_ranks(tmp_path, world, layout, [Fault(what, wrong, module) for what in FAULTS])
    found = [(event["step"], event["rank"], event["ranks"], event["verdict"]) for event in events]
    assert found == [(1000 * n + 1, wrong, [wrong], verdict) for n in range(len(FAULTS))]
    for event in events:
        assert event["agreed"] is None
        assert len(set(event["checksums"])) == 2
        if verdict == "gpu":
            (right,) = set(event["neighbour_checksums"])
            assert right == event["checksums"][1]


def test_the_first_stage_is_not_the_last(tmp_path: Path) -> None:
    """A wrong value of the first of two stages comes out of both; the first is named."""
    events = run_ranks(tmp_path, 2, (PP,), [Fault(what, 0, "blocks.0.ffn.up") for what in FAULTS])
    assert [event["ranks"] for event in events] == [[0]] * 3


def test_stages_of_a_rank_are_told_apart(tmp_path: Path) -> None:
    """A wrong value of the second of four stages comes out of both ranks; the second rank is named."""
    interleaved = (PP, "parallel.schedule=interleaved", "parallel.stages_per_rank=2", "model.layers=4")
    events = run_ranks(tmp_path, 2, interleaved, [Fault(what, 1, "blocks.1.ffn.up") for what in FAULTS])
    assert [event["ranks"] for event in events] == [[1]] * 3


def test_a_fault_once_in_twenty_passes_is_found_within_ten_replays(tmp_path: Path) -> None:
    """Each replay has two passes; those in which all went well say nothing, and are what was last equal."""
    events = run_ranks(tmp_path, 2, (), [Fault("activation", 1, every=20, first=14, replays=10)])
    assert [(event["step"], event["ranks"], event["agreed"]) for event in events] == [(7, [1], 6)]


def test_a_program_that_is_not_deterministic_is_told_from_a_gpu(tmp_path: Path) -> None:
    """Where the neighbour's two passes differ as well, no GPU is blamed."""
    events = run_ranks(tmp_path, 2, (), [Fault("noise", -1)])
    assert [(event["ranks"], event["verdict"]) for event in events] == [([0], "program"), ([1], "program")]


@pytest.mark.parametrize("name", ["alone", "dp2", "tp2", "pp2", "cp2"])
def test_replaying_changes_no_bit_of_the_training(tmp_path: Path, shards: Path, name: str) -> None:
    """With a replay after every step the losses, gradient norms, weights and moments are those without any."""
    layout = LAYOUTS.get(name, {})
    with_replays, without = (
        start(tmp_path / f"{every}", shards, layout, run__steps=4, replay__every=every) for every in (1, 0)
    )
    assert with_replays.curve() == without.curve()
    assert not with_replays.events("replay_differs")
    replayed = weights(with_replays, 4)
    for tensor, value in weights(without, 4).items():
        assert value.equal(replayed[tensor]), tensor


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_no_false_alarm_in_ten_thousand_replays(tmp_path: Path, compiled: str) -> None:
    """Five thousand of each of two ranks that also train meanwhile; faults that come then are found at once."""
    if compiled == "true" and not shutil.which("g++"):
        pytest.skip("compiling for the CPU needs a C++ compiler")
    small = (
        "model.layers=1",
        "model.width=16",
        "model.ffn=16",
        "model.heads=2",
        "model.kv_heads=1",
        "data.sequence=16",
    )
    healthy = [Fault("nothing", 0, "head", replays=1000)] * 5
    faults = [Fault(what, 1, "head") for what in FAULTS]
    events = run_ranks(tmp_path, 2, [*small, f"parallel.compile={compiled}"], healthy + faults)
    assert [(event["step"], event["ranks"]) for event in events] == [(1000 * n + 1, [1]) for n in (5, 6, 7)]
    assert [event["agreed"] for event in events] == [5000] * 3
