"""metrics.jsonl: whole lines or none, exact numbers, and never a reason to stop."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from opsd.trainer.config import Config, load
from opsd.trainer.counts import flops_per_token, parameters
from opsd.trainer.experts import LOADS
from opsd.trainer.metrics import MetricsLog
from opsd.trainer.telemetry import LoadsLog
from tests.fakes.tmpfs import tmpfs


@pytest.fixture
def config() -> Config:
    return load("tiny", ["data.shards=/data", "metrics.peak_flops=1e12"], {})


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_floats_keep_every_bit(tmp_path: Path, config: Config) -> None:
    """What is read back is the number that was written."""
    log = MetricsLog(tmp_path / "m.jsonl", config, ranks=2)
    values = [0.1 + 0.2, 1 / 3, math.pi * 1e-300, 5e-324]
    for value in values:
        log.write(step=1, loss=value)
    assert [line["loss"] for line in lines(tmp_path / "m.jsonl")] == values


def test_mfu_is_of_all_ranks_and_counts_attention(tmp_path: Path, config: Config) -> None:
    """MFU is model FLOP/s, attention included, over the peak of all ranks."""
    flops = flops_per_token(config.model, config.data.sequence)
    log = MetricsLog(tmp_path / "m.jsonl", config, ranks=2)
    log.begin(config.data.shape_at(1), flops)
    log.write(step=1)
    (line,) = lines(tmp_path / "m.jsonl")
    per_token = 6 * parameters(config.model) + 12 * 4 * 128 * 256
    assert line["mfu"] == pytest.approx(line["tokens_per_s"] * per_token / 2e12)
    assert line["tokens_per_s"] == pytest.approx(4 * 256 / line["step_s"])


def test_numbers_that_are_none_become_null(tmp_path: Path, config: Config) -> None:
    """NaN and infinity are not JSON; they are written as null."""
    MetricsLog(tmp_path / "m.jsonl", config, 1).write(step=1, loss=math.nan, grad_norm=math.inf, lr=0.5)
    text = (tmp_path / "m.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {text}"))
    assert (line["loss"], line["grad_norm"], line["lr"]) == (None, None, 0.5)


def test_a_next_start_appends(tmp_path: Path, config: Config) -> None:
    """Every start of a run adds to the same file."""
    for step in (1, 2):
        MetricsLog(tmp_path / "m.jsonl", config, 1).write(step=step)
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1, 2]


def test_a_full_disk_drops_whole_lines(tmp_path: Path, config: Config, capfd: pytest.CaptureFixture[str]) -> None:
    """Without space, lines are dropped whole and said so once; with space again they are written again."""
    with tmpfs(tmp_path, "size=8k"):
        log = MetricsLog(tmp_path / "m.jsonl", config, 1)
        longer_than_what_is_left = {f"value_{number}": 1 / 3 for number in range(100)}  # 3 kB
        for step in range(10):
            log.write(step=step, **longer_than_what_is_left)
        assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [0, 1]
        assert capfd.readouterr().err.count("No space left on device") == 1
        os.truncate(tmp_path / "m.jsonl", 0)
        log.write(step=100)
        assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [100]


def test_loads_of_experts_are_summed(tmp_path: Path) -> None:
    """Every so many steps there is a line with the tokens of each expert in them, and one at the end for the rest."""
    log = LoadsLog(tmp_path / "e.jsonl", load("tiny-moe", ["data.shards=/data", "metrics.experts_every=2"], {}))
    assert not (tmp_path / "e.jsonl").exists()
    measured = torch.zeros(2, LOADS + 3, dtype=torch.float64)
    measured[1, LOADS:] = torch.tensor([5, 3, 0])
    for step in (3, 4, 5, 6, 7):
        log.add(step, measured)
    log.write()
    log.write()
    found = [(line["step"], line["steps"], line["loads"]) for line in lines(tmp_path / "e.jsonl")]
    empty = [0, 0, 0]
    assert found == [(4, 2, [empty, [10, 6, 0]]), (6, 2, [empty, [10, 6, 0]]), (7, 1, [empty, [5, 3, 0]])]
