"""Studies of real runs: killed and repeated each cell runs once; verdicts hold for an A/A arm and a known effect."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, mean, stdev

import psutil
import pytest
from trainer_world import CONFIG

from opsd.ablate.cells import SETTINGS, Found, cells_of, look, prepare
from opsd.ablate.study import read_study
from opsd.ablate.verdict import judge
from tests.fakes.clock import until
from tests.integration.slurm.training import make_data

# A study of real runs: killed at any time and repeated, each cell runs once, and every loss has the same bits.


STUDY = """
baseline = "base.toml"
seeds = 2
set = ["data.shards=SHARDS", "run.steps=12", "schedule.decay_start=8", "schedule.decay_end=12", "checkpoint.every=2"]
[arm.rate]
set = ["optimizer.lr=1e-3"]
"""

ABLATE = [sys.executable, "-m", "opsd", "ablate"]


def study_in(folder: Path, shards: Path) -> Path:
    """The study of two arms and two seeds."""
    folder.mkdir(exist_ok=True)
    (folder / "base.toml").write_text(CONFIG)
    path = folder / "study.toml"
    path.write_text(STUDY.replace("SHARDS", str(shards)))
    return path


def found_in(study: Path, root: Path) -> list[Found]:
    """Its cells."""
    return [look(cell) for cell in cells_of(read_study(study), root)]


def losses(study: Path, root: Path) -> dict[str, dict[int, float | None]]:
    """Every loss by cell and step; a step that was done again must have had the same."""
    curves: dict[str, dict[int, float | None]] = {}
    for each in found_in(study, root):
        curve = curves.setdefault(each.cell.name, {})
        for line in (each.cell.folder / "metrics.jsonl").read_text().splitlines():
            step = json.loads(line)
            assert curve.setdefault(step["step"], step["loss"]) == step["loss"]
        assert sorted(curve) == list(range(1, 13))
    return curves


def starts(study: Path, root: Path) -> dict[str, int]:
    """How often each cell was started, by its name."""
    told = {each.cell.name: (each.cell.folder / "events.jsonl").read_text() for each in found_in(study, root)}
    return {name: text.count('"generation_started"') for name, text in told.items()}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """A study that nothing happened to; its folder has the default name."""
    study = study_in(tmp_path_factory.mktemp("quiet"), shards)
    done = subprocess.run([*ABLATE, "run", str(study), "--local"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 left, about" in done.stdout
    return study


@pytest.mark.xdist_group("studies")
@pytest.mark.slow
def test_a_finished_study_starts_nothing_and_reports(quiet: Path) -> None:
    """All cells are done after one command; the next one changes no file of them."""
    root = quiet.with_suffix("")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("metrics.jsonl")}
    again = subprocess.run([*ABLATE, "run", str(quiet), "--local"], capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (0, "4 of 4 cells done; `opsd ablate report` compares them\n")
    assert {path: path.stat().st_mtime_ns for path in root.rglob("metrics.jsonl")} == before
    assert set(starts(quiet, root).values()) == {1}
    told = subprocess.run([*ABLATE, "report", str(quiet), "--json", "-"], capture_output=True, text=True, check=True)
    report = json.loads(told.stdout)
    assert report["complete"] and not report["stale"] and report["alpha"] == 0.01
    (arm,) = report["arms"]
    assert (arm["name"], arm["pairs"]) == ("rate", 2)
    assert arm["low"] < arm["effect"] < arm["high"] and arm["effect"] > 0.1
    assert report["cost_gpu_hours"] == pytest.approx(sum(cell["gpu_hours"] for cell in report["cells"]))
    assert 0.001 < report["cost_gpu_hours"] < 0.2


def reached(study: Path, root: Path, steps: int) -> bool:
    """Whether all cells together have done so many steps."""
    return sum(each.step for each in found_in(study, root)) >= steps


@pytest.mark.xdist_group("studies")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_study_goes_on(tmp_path: Path, shards: Path, quiet: Path) -> None:
    """First the submitter is killed, whose cell goes on; then one with its cell; then the folder moves. Same bits."""
    study, root = study_in(tmp_path, shards), tmp_path / "cells of it"
    command = [*ABLATE, "run", str(study), "--local", "--dir", str(root)]
    for number, with_cell in enumerate((False, True)):  # in the first cell, and in the second
        submitter = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(partial(reached, study, root, 4 + 12 * number), 200)
        for process in [submitter, *(submitter.children(recursive=True) if with_cell else ())]:
            process.kill()
        submitter.wait()
    root = Path(shutil.move(root, tmp_path / "moved"))
    done = subprocess.run([*command[:-1], str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(study, root) == losses(quiet, quiet.with_suffix(""))
    assert sorted(starts(study, root).values()) == [1, 1, 1, 2]


@pytest.mark.xdist_group("studies")
@pytest.mark.slow
def test_ctrl_c_saves_the_cell(tmp_path: Path, shards: Path, quiet: Path) -> None:
    """It ends with the code of an interrupt, and the next call goes on from that step."""
    study = study_in(tmp_path, shards)
    study.write_text(study.read_text().replace("seeds = 2", "seeds = 1").replace("every=2", "every=1000"))
    command = [*ABLATE, "run", str(study), "--local"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: any(each.step >= 3 for each in found_in(study, study.with_suffix(""))), 120)
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate()
    assert process.returncode == 3, said
    assert "the same command goes on" in said
    (first, *_) = found_in(study, study.with_suffix(""))
    assert first.state in ("stopped", "done")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.xdist_group("studies")
@pytest.mark.slow
def test_a_cell_that_fails_is_told_and_the_others_go_on(tmp_path: Path, shards: Path) -> None:
    """With its exit code and its log; the study then ends with 1."""
    study = study_in(tmp_path, shards)
    text = study.read_text().replace("seeds = 2", "seeds = 1").replace("optimizer.lr=1e-3", "run.initial=/nowhere")
    study.write_text(text)
    done = subprocess.run([*ABLATE, "run", str(study), "--local"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "baseline with seed 1" in done.stdout and "rate with seed 1" in done.stdout
    assert "failed with exit code" in done.stderr and "cell.log" in done.stderr
    assert [each.state for each in found_in(study, study.with_suffix(""))] == ["done", "failed"]


# A pool of 24 real runs, from which verdicts are drawn: an A/A arm never wins, a known effect is found.


POOLED = """
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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_verdicts_drawn_from_real_runs_are_right(tmp_path: Path) -> None:
    """The runs of the A/A arm have the bits of the baseline; paired with other seeds, they have its noise."""
    path = tmp_path / "study.toml"
    path.write_text(POOLED.replace("SHARDS", str(make_data(tmp_path, 400_000))).replace("KNOWN", KNOWN))
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
