"""What a study reports: verdicts, power, promotions, and the commands that say so."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from opsd import exitcodes
from opsd.ablate.study import read_study
from opsd.commands.main import cli
from tests.fakes.studies import ARM, end_cell, make_study, study_and_cells
from tests.unit.test_command_output import on_terminal

NOISE = (0.02, -0.01, 0.015, -0.02, 0.0, 0.005, -0.015, 0.01)


def ablate(*words: object) -> Result:
    """The result of the command; a bug in it fails the test."""
    result = CliRunner().invoke(cli, ["ablate", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit | click.ClickException):
        raise result.exception
    return result


def ended(tmp_path: Path, effect: float = -0.5, arms: str = ARM, head: str = "", seeds: int = 8) -> Path:
    """A study whose cells have ended: the seeds differ, and all arms have the same ``effect``."""
    path = make_study(tmp_path, arms, head)
    path.write_text(path.read_text().replace("seeds = 3", f"seeds = {seeds}"))
    for cell in study_and_cells(path)[1]:
        own = cell.arm.name != "baseline"
        end_cell(cell, 3.0 + 10 * NOISE[cell.seed - 1] + own * (effect + NOISE[-cell.seed]))
    return path


def told(path: Path, *words: object) -> dict[str, object]:
    """The report as JSON."""
    result = ablate("report", path, "--json", "-", *words)
    assert result.exit_code == 0, result.output
    document: dict[str, object] = json.loads(result.stdout)
    return document


@pytest.mark.parametrize(
    ("effect", "margin", "verdict"),
    [(-0.5, 0.1, "better"), (0.5, 0.1, "worse"), (0.0, 0.1, "equivalent"), (0.005, 0.01, "undecided")],
)
def test_verdicts(tmp_path: Path, effect: float, margin: float, verdict: str) -> None:
    """A lower loss is better; what lies within the margin is equivalent; the rest is not decided."""
    report = told(ended(tmp_path, effect, head=f"margin = {margin}"))
    assert report["complete"] is True and report["alpha"] == 0.01 and report["stale"] is None
    (arm,) = report["arms"]  # type: ignore[misc]
    assert (arm["name"], arm["verdict"], arm["pairs"], arm["equal"]) == ("lr", verdict, 8, "tokens")
    assert arm["low"] <= arm["effect"] <= arm["high"]
    assert report["cost_gpu_hours"] == pytest.approx(16 * 2 * 30 / 3600)


def test_cells_that_are_missing_make_no_pair(tmp_path: Path) -> None:
    """An unfinished study says so, and numbers that do not exist are null."""
    path = make_study(tmp_path)
    end_cell(study_and_cells(path)[1][0])
    report = told(path)
    (arm,) = report["arms"]  # type: ignore[misc]
    assert (report["complete"], arm["verdict"], arm["pairs"], arm["effect"], arm["low"]) == (
        False,
        "undecided",
        0,
        None,
        None,
    )


def test_a_table_has_no_number_that_does_not_exist(tmp_path: Path) -> None:
    """Nor an interval without ends."""
    assert ablate("report", make_study(tmp_path)).output.splitlines()[1].split() == [
        "lr",
        "undecided",
        "-",
        "-",
        "0",
        "-",
    ]


def test_an_arm_cannot_win_by_failing(tmp_path: Path) -> None:
    """The seed on which it failed may be its worst."""
    path = ended(tmp_path)
    end_cell(study_and_cells(path)[1][-1], steps=3, code=1)
    (arm,) = told(path)["arms"]  # type: ignore[misc]
    assert (arm["verdict"], arm["pairs"]) == ("undecided", 7)
    assert "failed at seed 8" in arm["reason"]


def test_a_look_that_was_not_planned_is_refused(tmp_path: Path) -> None:
    """The level alpha is shared by the planned ones."""
    path = ended(tmp_path, head="looks = 2")
    assert told(path, "--look", "2")["look"] == 2
    result = ablate("report", path, "--look", "3")
    assert result.exit_code == exitcodes.USAGE and "look 3" in result.output and "looks" in result.output


@pytest.mark.parametrize("command", ["report", "status"])
def test_tables_fit_a_terminal_of_80_columns(tmp_path: Path, command: str) -> None:
    """With the longest of words."""
    path = ended(tmp_path, arms='[arm.a-learning-rate-of-a-third]\nset = ["optimizer.lr=1e-3"]\n', seeds=4)
    shown = on_terminal([sys.executable, "-m", "opsd", "ablate", command, str(path)], 80)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    table = lines[: lines.index("")] if command == "report" else lines
    assert max(map(len, table)) <= 80 and "…" not in shown
    assert "a-learning-rate" in shown


def test_the_cost_stands_beside_the_plan_of_the_main_run(tmp_path: Path) -> None:
    """The plan is in the folder of that run. Without one, the sentence says how to make it."""
    path = ended(tmp_path, seeds=3)
    assert "opsd plan --run" in ablate("report", path, "--beside", tmp_path).output
    planned = CliRunner().invoke(cli, ["plan", "smollm3-3b", "--gpus", "384", "--run", str(tmp_path)])
    assert planned.exit_code == 0
    assert "GPU-hours planned, of which this is 0.0%" in ablate("report", path, "--beside", tmp_path).output
    hours = told(path, "--beside", tmp_path)["planned_gpu_hours"]
    assert isinstance(hours, float) and 150_000 < hours < 300_000


def test_power_comes_from_the_runs_of_the_baseline(tmp_path: Path) -> None:
    """A smaller effect needs more seeds; more than the budget allows is the answer no."""
    path = ended(tmp_path, head="budget_gpu_hours = 3")
    small, large = ablate("power", path, "--effect", "0.1"), ablate("power", path, "--effect", "1")
    assert (small.exit_code, large.exit_code) == (exitcodes.FAILED, 0)
    assert "8 runs of the baseline" in large.output
    assert "more than budget_gpu_hours 3" in small.output
    assert ablate("power", path, "--effect", "1e-9").exit_code == exitcodes.FAILED


def test_power_needs_two_runs(tmp_path: Path) -> None:
    """The sentence says how to get them."""
    result = ablate("power", make_study(tmp_path), "--effect", "1")
    assert result.exit_code == exitcodes.USAGE and "opsd ablate pilot" in result.output


def test_a_run_that_would_pass_the_budget_does_not_begin(tmp_path: Path) -> None:
    """As far as the cells that are done tell what the others will cost."""
    path = make_study(tmp_path, head="budget_gpu_hours = 0.05")
    end_cell(study_and_cells(path)[1][0])
    result = ablate("run", path, "--local")
    assert result.exit_code == exitcodes.FAILED
    assert "about 0.10 GPU-hours, more than budget_gpu_hours 0.05" in result.output
    assert len(list(path.with_suffix("").rglob("cell.toml"))) == 1


def test_a_promotion_has_its_evidence(tmp_path: Path) -> None:
    """The new baseline has the change and nothing that the study sets; it is a baseline of studies itself."""
    path = ended(tmp_path)
    result = ablate("promote", path, "lr")
    assert (result.exit_code, result.output) == (0, f"{tmp_path}/study-lr.toml\n")
    text = (tmp_path / "study-lr.toml").read_text()
    assert "# Verdict better on loss at alpha 0.01: effect -0.499" in text and "8 pairs" in text
    assert "lr = 0.001" in text and "steps = 250" in text and "shards" not in text
    path.write_text(path.read_text().replace('"tiny"', '"study-lr.toml"').replace("1e-3", "2e-3"))
    assert read_study(path).baseline.config.optimizer.lr == 1e-3


def test_comparisons_with_an_old_baseline_are_stale(tmp_path: Path) -> None:
    """In each study beside it that has the same baseline, and not in those of another."""
    path = ended(tmp_path)
    ablate("promote", path, "lr")
    assert "study-lr.toml has replaced this baseline" in str(told(path)["stale"])
    other = tmp_path / "other.toml"
    other.write_text(path.read_text().replace("run.steps=20", "run.steps=30"))
    assert "study-lr.toml has replaced this baseline" in ablate("report", other).output
    other.write_text(path.read_text().replace('"tiny"', '"study-lr.toml"').replace("1e-3", "2e-3"))
    assert told(other)["stale"] is None


def test_what_is_not_better_is_promoted_with_a_reason_only(tmp_path: Path) -> None:
    """The reason is in the file, which is never overwritten."""
    path = ended(tmp_path, 0.0)
    refused = ablate("promote", path, "lr")
    assert refused.exit_code == exitcodes.USAGE and "--reason" in refused.output
    assert not (tmp_path / "study-lr.toml").exists()
    assert ablate("promote", path, "lr", "--reason", "it is simpler").exit_code == 0
    assert "# Reason: it is simpler" in (tmp_path / "study-lr.toml").read_text()
    assert "exists" in ablate("promote", path, "lr", "--reason", "it is simpler").output
    assert "has no arm rate; its arms are lr" in ablate("promote", path, "rate").output


@pytest.mark.parametrize("command", ["run", "status", "report", "stop"])
def test_a_study_that_cannot_be_used_is_one_sentence(tmp_path: Path, command: str) -> None:
    """Nothing is started."""
    result = ablate(command, make_study(tmp_path, '[arm.long]\nset = ["run.steps=40"]\n'))
    assert result.exit_code == exitcodes.USAGE
    assert result.output.startswith(f"opsd: {tmp_path}/study.toml: arm long: tokens") and result.output.count("\n") == 1
    assert "cannot be read" in ablate(command, tmp_path / "none.toml").output
