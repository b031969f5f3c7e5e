"""The segment of a run of the included trainer follows from its tensor and expert parallel degrees."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.commands.launch_settings import segment_of_trainer
from opsd.launch.ranks.settings import Program


def trainer(*args: str) -> Program:
    return Program("module", "opsd.trainer", args, "python", Path("/"))


@pytest.mark.parametrize(("args", "local_size", "segment"), [
    (("--set", "parallel.tp=4", "--set=data.shards=/x", "--fresh", "--", "smollm3-3b"), 2, 2),
    (("tiny-moe", "--set", "data.shards=/x", "--set", "parallel.ep=8", "--set", "parallel.tp=2"), 4, 4),
    (("tiny-moe", "--set", "data.shards=/x", "--set", "parallel.ep=4"), 8, 1),
    (("smollm3-3b", "--set", "data.shards=/x", "--set", "parallel.tp=4"), 3, 1),
])  # fmt: skip
def test_a_group_of_several_nodes_is_a_segment(args: tuple[str, ...], local_size: int, segment: int) -> None:
    """A group inside a node is none, nor is one that ends in the middle of a node."""
    assert segment_of_trainer(trainer(*args), local_size) == segment


@pytest.mark.parametrize("program", [
    Program("module", "torchtitan.train", ("tiny", "--set", "parallel.tp=4"), "python", Path("/")),
    trainer(),
    trainer("tiny", "--set"),
    trainer("no-such-preset", "--set", "parallel.tp=4"),
])  # fmt: skip
def test_unknown_is_no_segment(program: Program) -> None:
    """Other programs, and command lines that the trainer itself refuses, in words of its own."""
    assert segment_of_trainer(program, 2) == 1
