"""Weights of a mixture that are proposed from small runs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from opsd.trainer.config import load
from opsd.trainer.data.propose import Ablation, propose, read_run
from opsd.trainer.data.shards import DataError

SLOPES = {"web": 3.0, "code": 2.0, "math": 2.5}
"""Losses of a run on one source alone."""


def ablations(count: int, noise: float = 0.0) -> list[Ablation]:
    drawn = random.Random(1)
    runs = []
    for number in range(count):
        parts = [drawn.random() for _ in SLOPES]
        weights = {name: part / sum(parts) for name, part in zip(SLOPES, parts, strict=True)}
        loss = sum(weights[name] * slope for name, slope in SLOPES.items()) + drawn.gauss(0, noise)
        runs.append(Ablation(f"run-{number}", weights, {"held": loss, "other": 9 - loss}))
    return runs


def test_it_goes_where_the_losses_fall() -> None:
    """The proposal has more of what lowers the wanted loss, and is predicted to be about as good as the best run."""
    found = propose(ablations(12), {"held": 1.0})
    assert sum(found.weights.values()) == pytest.approx(1)
    assert found.weights["code"] > max(found.weights["web"], 0.4)
    assert found.predicted == pytest.approx(sum(found.weights[name] * SLOPES[name] for name in SLOPES), abs=1e-3)
    assert found.error < 1e-3
    against = propose(ablations(12), {"other": 2.0})
    assert against.weights["web"] > found.weights["web"]


def test_it_says_how_far_predictions_are_off() -> None:
    """Noise of the losses is in the error, which comes from runs that were left out."""
    assert 0.05 < propose(ablations(30, noise=0.1), {"held": 1.0}).error < 0.2


@pytest.mark.parametrize(("runs", "targets", "expected"), [
    (ablations(3), {}, "3 runs of 3 sources; it takes 2 sources and more runs than sources"),
    (ablations(6), {"code": 1.0}, "not every run has been evaluated on 'code'; they share held, other"),
    ([ablations(1)[0]] * 6, {}, "too similar mixtures"),
])  # fmt: skip
def test_too_little_is_refused(runs: list[Ablation], targets: dict[str, float], expected: str) -> None:
    """In one sentence."""
    with pytest.raises(DataError, match=expected):
        propose(runs, targets)


def write_run(folder: Path, run: Ablation) -> None:
    weights = ", ".join(f"{name} = {weight:.3f}" for name, weight in run.weights.items())
    weights = weights.rpartition(" = ")[0] + f" = {1 - sum(round(w, 3) for w in [*run.weights.values()][:-1]):.3f}"
    config = load("tiny", ["data.shards=/d", f"data.stages=[{{start = 1, weights = {{{weights}}}}}]"], {})
    folder.mkdir()
    (folder / "config.json").write_text(config.model_dump_json())
    results = [{"held_loss": 9.0}, {"held_loss": run.losses["held"], "held_bits_per_byte": 1.0}, {}]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps({"results": one}) + "\n" for one in results))


def test_from_the_folders_of_runs(tmp_path: Path) -> None:
    """The command prints weights for a stage; the last losses count, and a failed evaluation after them does not."""
    for run in ablations(6):
        write_run(tmp_path / run.name, run)
    assert read_run(tmp_path / "run-2").losses == {"held": ablations(6)[2].losses["held"]}
    command = [sys.executable, "-m", "opsd.trainer.data", "propose", *map(str, sorted(tmp_path.glob("run-*")))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[0]
    assert load("tiny", ["data.shards=/d", f"data.stages=[{{start = 1, {line}}}]"], {}).data.sources[0] == "code"
    refused = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"opsd: {tmp_path} is not the folder of a run with evaluations")
