"""A pool of 24 real runs, from which verdicts are drawn: an A/A arm never wins, a known effect is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from statistics import fmean, mean, stdev

import pytest

from opsd.ablate.cells import SETTINGS, cells_of, prepare
from opsd.ablate.study import read_study
from opsd.ablate.verdict import judge
from tests.integration.slurm.training import make_data

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

STUDY = """
baseline = "tiny"
seeds = 8
set = [
    "data.shards=SHARDS", "data.sequence=64", "run.steps=40", "model.width=64", "model.ffn=160",
    "schedule.decay_start=30", "schedule.decay_end=40",
]
[arm.same]
[arm.rate]
set = ["optimizer.lr=KNOWN"]
"""
KNOWN = "3e-4"
"""A tenth of the learning rate of the baseline."""
DRAWS, PAIRS = 20, 6


def test_verdicts_drawn_from_real_runs_are_right(tmp_path: Path) -> None:
    """The runs of the A/A arm have the bits of the baseline; paired with other seeds, they have its noise."""
    path = tmp_path / "study.toml"
    path.write_text(STUDY.replace("SHARDS", str(make_data(tmp_path, 400_000))).replace("KNOWN", KNOWN))
    values: dict[str, dict[int, float]] = {}
    for cell in cells_of(read_study(path), path.with_suffix("")):
        prepare(cell)
        subprocess.run([sys.executable, "-m", "opsd.trainer", str(cell.folder / SETTINGS)], check=True)
        lines = map(json.loads, (cell.folder / "metrics.jsonl").read_text().splitlines())
        value = fmean([line["loss"] for line in lines][-cell.steps // 10 :])
        values.setdefault(cell.arm.name, {})[cell.seed] = value
    baseline, same, rate = values["baseline"], values["same"], values["rate"]
    assert same == baseline
    effect = [rate[seed] - baseline[seed] for seed in baseline]
    print(f"baseline {mean(baseline.values()):.4f}, deviation {stdev(baseline.values()):.4f}")
    print(f"effect {mean(effect):+.4f}, deviation of a pair {stdev(effect):.4f}")

    rng, right, winners = Random(37), 0, 0
    for _ in range(DRAWS):
        seeds = rng.sample(sorted(baseline), PAIRS)
        others = rng.sample(sorted(baseline), PAIRS)
        drawn = {
            "same": {seed: same[other] for seed, other in zip(seeds, others, strict=True)},
            "rate": {seed: rate[seed] for seed in seeds},
        }
        found = {each.name: each.verdict for each in judge({seed: baseline[seed] for seed in seeds}, drawn)}
        winners += found["same"] in ("better", "worse")
        right += found["rate"] == "worse" and found["same"] in ("undecided", "equivalent")
    print(f"{right} of {DRAWS} right, {winners} winners in A/A")
    assert winners == 0 and right >= DRAWS - 1
