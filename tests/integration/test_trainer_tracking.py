"""The numbers of a run in TensorBoard, and in W&B and Trackio where they are installed."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from trainer_world import Run, make_small_corpus

from opsd.client import events_path
from opsd.ledger.ledger import read_places
from opsd.trainer.config import Config, ConfigError, load
from opsd.trainer.settings import TrackingSettings
from opsd.trainer.tracking import demand_installed, numbers, shape, without_secrets


def written(folder: Path) -> dict[str, dict[int, tuple[float, float]]]:
    """What TensorBoard's own loader finds: by tag and step, wall time and value. A step must be there only once."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for path in sorted((folder / "tracking" / "tensorboard").iterdir()):
        for event in loader.LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                assert event.step not in found.setdefault(value.tag, {})
                found[value.tag][event.step] = event.wall_time, value.simple_value
    return found


def add_lines(folder: Path, steps: range) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        for step in steps:
            line = {"t": 1000.5 + step, "generation": 1, "step": step, "loss": 1 / step, "mfu": None}
            file.write(json.dumps(line) + "\n")


def pass_on(folder: Path, trackers: dict[str, str], **environ: str) -> None:
    """Run the process until it has passed on what there is."""
    order: dict[str, Any] = {"folder": str(folder), "page": str(folder / "page"), "shape": {"model": {"layers": 2}}}
    order |= {"run": "a-run", "trackers": trackers}
    command = [sys.executable, "-m", "opsd.trainer.tracking", json.dumps(order)]
    done = subprocess.run(command, input=b"", capture_output=True, env=os.environ | environ)
    assert done.returncode == 0, done.stderr.decode()


def test_a_run_fills_tensorboard_and_goes_on_filling_it(tmp_path: Path) -> None:
    """Every step of a run that was stopped and gone on with is there once, with the loss of its metrics."""
    run = Run(tmp_path / "run", make_small_corpus(tmp_path / "shards"), {"tracking.tensorboard": "true"})
    for last in (5, 10):
        assert run.start(run__steps=last).wait() == [0, 0], run.log().read_text()
    found = written(run.folder)
    assert {"train/loss", "train/grad_norm", "train/lr", "train/tokens_per_s"} <= found.keys()
    assert "train/mfu" not in found
    losses = {line["step"]: pytest.approx((line["t"], line["loss"])) for line in run.metrics()}
    assert found["train/loss"] == losses
    assert list(losses) == list(range(1, 11))


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """Lines are passed on once, half a line when it is whole, and evaluations at the step of their checkpoint."""
    add_lines(tmp_path, range(1, 4))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"t": 1004.5, "step": 4,')
    pass_on(tmp_path, {"tensorboard": "True"})
    assert list(written(tmp_path)["train/loss"]) == [1, 2, 3]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(' "loss": 0.25}\n')
    (tmp_path / "evaluations.jsonl").write_text('{"t": 1005.0, "step": 2, "results": {"held_loss": 3.5}}\n')
    pass_on(tmp_path, {"tensorboard": "True"})
    assert written(tmp_path)["train/loss"][4] == (1004.5, 0.25)
    assert written(tmp_path)["evaluation/held_loss"] == {2: (1005.0, 3.5)}


def test_a_tracker_that_fails_stops_nothing(tmp_path: Path) -> None:
    """The run trains to its end, and an event says which tracker failed and why."""
    run = Run(tmp_path / "run", make_small_corpus(tmp_path / "shards"), {"tracking.tensorboard": "true"})
    (run.folder / "tracking").mkdir(parents=True)
    (run.folder / "tracking" / "tensorboard").write_text("no folder")
    assert run.start(run__steps=3).wait() == [0, 0], run.log().read_text()
    assert len(run.metrics()) == 3
    (event,) = run.events("tracking_failed")
    assert event["tracker"] == "tensorboard"
    assert "tensorboard" in event["why"]


def test_where_the_run_is_tracked_is_written_for_the_page_of_its_job(tmp_path: Path) -> None:
    """The folder of TensorBoard; W&B has an address where it is online."""
    add_lines(tmp_path, range(1, 3))
    pass_on(tmp_path, {"tensorboard": "true"})
    assert read_places(tmp_path) == {"tensorboard": str(tmp_path / "tracking" / "tensorboard")}


def test_an_unknown_project_of_a_tracker_is_told(tmp_path: Path) -> None:
    """A tracker that cannot be begun is told once, and what is passed on counts as passed on."""
    add_lines(tmp_path, range(1, 3))
    pass_on(tmp_path, {"nothing": "project"}, OPSD_TEST_TOKEN="nothing")
    (line,) = events_path(tmp_path / "page").read_text().splitlines()
    assert json.loads(line)["why"] == "KeyError: '$OPSD_TEST_TOKEN'"
    position = json.loads((tmp_path / "tracking" / "position.json").read_text())
    assert position == {"metrics.jsonl": (tmp_path / "metrics.jsonl").stat().st_size}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_weights_and_biases_takes_the_numbers(tmp_path: Path) -> None:
    """Without a network or an account: the run's own record has the losses."""
    add_lines(tmp_path, range(1, 4))
    (tmp_path / "evaluations.jsonl").write_text('{"t": 1005.0, "step": 2, "results": {"held_loss": 3.5}}\n')
    pass_on(tmp_path, {"wandb": "a-project"}, WANDB_MODE="offline", WANDB_SILENT="true")
    (info,) = (tmp_path / "tracking" / "wandb").glob("offline-run-*-a-run/run-a-run.wandb")
    content = info.read_bytes()
    assert b"train/loss" in content
    assert b"evaluation/held_loss" in content
    assert b"a-project" in content
    assert not events_path(tmp_path / "page").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_takes_the_numbers(tmp_path: Path) -> None:
    """Without a Space: its database has the losses."""
    add_lines(tmp_path, range(1, 4))
    pass_on(tmp_path, {"trackio": "a-project"}, TRACKIO_DIR=str(tmp_path / "trackio"))
    database = sqlite3.connect(next((tmp_path / "trackio").glob("a-project*.db")))
    rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [(step, json.loads(metrics)["train/loss"]) for step, metrics in rows] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert not events_path(tmp_path / "page").exists()


def test_a_tracker_that_is_not_installed_is_refused() -> None:
    """In one sentence, before anything begins."""
    with pytest.raises(ConfigError, match=r"tracking\.wandb needs the package: pip install wandb"):
        demand_installed(TrackingSettings(wandb="project"), lambda name: None)


@pytest.fixture
def config() -> Config:
    return load("tiny", ["data.shards=/secret", "checkpoint.remote=s3://key:secret@bucket/run"], {})


def test_trackers_are_told_the_shape_of_the_run_only(config: Config) -> None:
    """No path, command or address, in which there may be secrets."""
    told = shape(config)
    assert told["model"]["layers"] == config.model.layers
    assert told["run"] == {"steps": config.run.steps, "seed": config.run.seed}
    assert "secret" not in json.dumps(told)


def test_what_failed_is_said_without_secrets() -> None:
    """Values of variables that are named like secrets are struck out of error messages."""
    environ = {"WANDB_API_KEY": "abcdef", "HF_TOKEN": "xyz1", "HOME": "/home/me", "EMPTY_KEY": ""}
    text = without_secrets("key abcdef of /home/me is not xyz1", environ)
    assert text == "key $WANDB_API_KEY of /home/me is not $HF_TOKEN"


def test_only_numbers_are_curves() -> None:
    """Nulls, texts and what says where the line belongs are left out."""
    line = {"t": 1.0, "step": 2, "generation": 3, "loss": 4, "mfu": None, "why": "no"}
    assert numbers(line) == {"loss": 4.0}
