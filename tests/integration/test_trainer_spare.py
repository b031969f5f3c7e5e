"""The trainer under real launchers: a node dies, a spare takes its place, and its state comes from the partner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trainer_world import CONFIG, make_small_corpus

from opsd.trainer import memory
from tests.fakes.nodes import Nodes

pytestmark = pytest.mark.slow


def test_a_spare_gets_the_state_of_the_lost_node_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from the disk, and the steps that are computed again come out the same."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shards = make_small_corpus(tmp_path / "shards")
    (tmp_path / "config.toml").write_text(CONFIG)
    settings = (f"data.shards={shards}", "run.steps=100000", "checkpoint.every=0", "checkpoint.minutes=0.1")
    program = ["-m", "opsd.trainer", str(tmp_path / "config.toml"), *(f"--set={setting}" for setting in settings)]
    flags = ("--nnodes=2", "--spares=1", "--nproc-per-node=1")

    def copied() -> bool:
        held = [list(memory.all_infos(tmp_path / node / "r")) for node in ("n1", "n2")]
        return all(len(records) == 2 for records in held) and len({info.save for one in held for info in one}) == 1

    with Nodes(tmp_path, "", *flags, count=3, program=program) as nodes:
        nodes.until(lambda: nodes.events("checkpoint_committed") and copied())
        nodes.kill("n2")
        nodes.until(lambda: nodes.events("resumed"))
        (loaded,) = nodes.events("checkpoint_loaded")
        assert loaded["tier"] == "partner"
        assert nodes.events("generation_started")[-1]["nodes"] == ["n1", "n3"]
        assert nodes.events("resumed")[0]["step"] == loaded["step"] + 1
    losses: dict[int, float] = {}
    whole, _, _ = (nodes.run / "metrics.jsonl").read_text().rpartition("\n")
    for line in whole.splitlines():
        metrics = json.loads(line)
        assert losses.setdefault(metrics["step"], metrics["loss"]) == metrics["loss"]
