"""What a study reports: verdicts, power, promotions, and the commands that say so."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from opsd import exitcodes
from opsd.ablate.study import read_study
from opsd.agent.web.ledgers import beside_of
from opsd.commands.main import cli
from opsd.ledger.beside import ABLATIONS, DATA, DataRun, note
from opsd.ledger.for_user import records_for_user
from opsd.report.page import report_page
from opsd.report.run import Price, read_run
from tests.fakes.studies import ARM, end_cell, make_study, study_and_cells
from tests.unit.test_command_output import on_terminal
from tests.unit.test_report import EVENTS, STEPS

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


def test_the_main_run_knows_what_its_studies_cost(tmp_path: Path) -> None:
    """So it does of pipelines of data. Each is noted once, for the run's report and the pages of agents."""
    run = tmp_path / "main"
    run.mkdir()
    for name, lines in (("events.jsonl", EVENTS), ("metrics.jsonl", STEPS)):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert CliRunner().invoke(cli, ["plan", "smollm3-3b", "--gpus", "384", "--run", str(run)]).exit_code == 0
    path = ended(tmp_path, head='main_run = "main"', seeds=3)
    for _ in range(2):
        hours = told(path)["cost_gpu_hours"]
    assert len((run / ABLATIONS).read_text().splitlines()) == 1
    (study,) = read_run(run).ablations
    assert (study.gpu_hours, study.cells, study.done) == (hours, 6, 6)
    for t in (1.0, 2.0):
        note(run, DataRun("<web>.py", 40, 39, 120.0, 7.5), t)
    assert len((run / DATA).read_text().splitlines()) == 1
    text = CliRunner().invoke(cli, ["report", str(run), "--text"]).output
    assert re.search(r"data +120\.00 core-hours of 1 pipeline, 7\.50 lost to retries, beside [\d,]{7} GPU-hours", text)
    assert "&lt;web&gt;.py" in report_page(read_run(run), Price())
    assert "ablations 0.10 GPU-hours of 1 study, 0.0% of the plan" in re.sub(" +", " ", text)
    assert str(path) in report_page(read_run(run), Price())
    ledger = records_for_user(run, os.getuid())
    lines = beside_of(ledger)
    assert lines["ablations"].startswith("0.10 GPU-hours of 1 study, 0.0%")
    assert lines["data"].startswith("120.00 core-hours")
    with (run / ABLATIONS).open("a") as file:
        file.write('{"t": 1, "study": "x", "cells": -1, "done": 0, "gpu_hours": 1e999}\n[]\n{"t')
    assert len(read_run(run).ablations) == 1
    path.write_text(path.read_text().replace('"main"', '"elsewhere"'))
    assert "not noted in the main run" in ablate("report", path).output


def test_a_study_has_a_page(tmp_path: Path) -> None:
    """With all arms, best first, and no text of a user that is HTML."""
    path = ended(tmp_path, arms=ARM + "[arm.same]\n")
    file = tmp_path / "study.html"
    assert ablate("report", path, "--html", file).exit_code == 0
    text = file.read_text()
    assert text.index(">lr</text>") < text.index(">same</text>")
    assert "optimizer.lr=1e-3" in text and "nothing (A/A)" in text and 'id="cost"' in text
    assert ablate("report", path, "--html", "-").output == text
    assert "could not be written" in ablate("report", path, "--html", file / "x.html").output


def test_power_is_planned_before_anything_is_spent(tmp_path: Path) -> None:
    """From a spread that is known and the plan for a kind of GPU; the budget stops it."""
    path = make_study(tmp_path, head="budget_gpu_hours = 1e-9")
    words = ("power", path, "--effect", "0.02", "--spread", "0.02")
    assert "16 seeds in 2 arms with the baseline; cost: unknown; --gpu" in ablate(*words).output
    planned = ablate(*words, "--gpu", "h100")
    assert planned.exit_code == exitcodes.FAILED
    assert "by opsd plan on 1 GPU of h100" in planned.output and "more than budget_gpu_hours 1e-09" in planned.output
    refused = ablate(*words, "--gpu", "h100", "--gpus", "3")
    assert refused.exit_code == exitcodes.USAGE and "cannot be planned on 3 GPUs" in refused.output


def test_tasks_are_probed(tmp_path: Path) -> None:
    """The criteria of each task from the baseline's checkpoints, and whether the early order was the last one."""
    arms = "".join(f'[arm.lr{n}]\nset = ["optimizer.lr={n}e-4"]\n' for n in (1, 2, 3))
    path = make_study(tmp_path, arms)
    _, cells = study_and_cells(path)
    assert "no cell has an evaluation" in ablate("probes", path).output
    for cell in cells:
        end_cell(cell)
        level = int(cell.arm.name[2:]) if cell.arm.name != "baseline" else 0
        lines = []
        for step in (2, 10, 20):
            score = 0.25 + (0.01 * step if step > 2 else 0.0) + 0.02 * level + 0.001 * cell.seed
            results = {"arc_accuracy": score, "web_loss": 4 - score, "noise_accuracy": 0.25}
            lines.append(json.dumps({"step": step, "results": results}) + "\n")
        (cell.folder / "evaluations.jsonl").write_text("".join(lines))
        scores = cell.folder / "scores" / "step-00000020"
        scores.mkdir(parents=True)
        (scores / "arc.jsonl").write_text('{"log_likelihoods": [-1, -2, -3, -4]}\n')
    result = ablate("probes", path, "--json", "-")
    assert result.exit_code == 0
    arc, noise, web = json.loads(result.stdout)["tasks"]
    assert (arc["task"], arc["seeds"], arc["checkpoints"], arc["chance"], arc["early"]) == (
        "arc_accuracy",
        3,
        3,
        0.25,
        0.1,
    )
    assert arc["monotonic"] == arc["order"] == arc["predicted"] == 1.0 and not arc["random"]
    assert arc["signal_to_noise"] > 50 and arc["predicted_low"] == 1.0
    assert (noise["monotonic"], noise["signal_to_noise"], noise["random"], noise["predicted"]) == (0, 0, None, 0)
    assert (web["monotonic"], web["chance"], web["random"]) == (1.0, None, None)
    assert "arc_accuracy" in ablate("probes", path).output
    assert json.loads(ablate("probes", path, "--json", "-", "--early", "0.4").stdout)["tasks"][0]["early"] == 0.5


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
    assert "lr = 0.001" in text and "steps = 250" in text and "# Measured with set = [" in text
    assert "shards" not in "".join(line for line in text.splitlines() if not line.startswith("#"))
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
    (tmp_path / "promotions.jsonl").write_text("no JSON\n")
    assert "nothing tells whether a promotion has replaced" in str(told(path)["stale"])


def test_a_promotion_that_cannot_be_recorded_leaves_no_baseline(tmp_path: Path) -> None:
    """Studies beside it would not know that they are stale."""
    path = ended(tmp_path)
    (tmp_path / "promotions.jsonl").mkdir()
    assert "Is a directory" in ablate("promote", path, "lr").output
    assert not (tmp_path / "study-lr.toml").exists()


def test_what_is_not_better_is_promoted_with_a_reason_only(tmp_path: Path) -> None:
    """The reason is in the file, which is never overwritten."""
    path = ended(tmp_path, 0.0)
    refused = ablate("promote", path, "lr")
    assert refused.exit_code == exitcodes.USAGE and "--reason" in refused.output
    assert not (tmp_path / "study-lr.toml").exists()
    assert ablate("promote", path, "lr", "--reason", "it is simpler\n[run]\nsteps = 7").exit_code == 0
    assert "# Reason: it is simpler [run] steps = 7\n" in (tmp_path / "study-lr.toml").read_text()
    assert "exists" in ablate("promote", path, "lr", "--reason", "it is simpler").output
    assert "has no arm rate; its arms are lr" in ablate("promote", path, "rate").output


@pytest.mark.parametrize("option", ["--json", "--html"])
@pytest.mark.parametrize("place", ["study.toml", "study/origin.json", "study/cells/report.json"])
def test_a_report_never_takes_the_place_of_its_study(tmp_path: Path, option: str, place: str) -> None:
    """A slip of the hand would lose the study, or have all of it run again."""
    path = ended(tmp_path)
    before = path.read_bytes()
    refused = ablate("report", path, option, tmp_path / place)
    assert refused.exit_code == exitcodes.USAGE and "belongs to the study" in refused.output
    assert path.read_bytes() == before


def test_a_cell_with_the_content_of_another_is_refused(tmp_path: Path) -> None:
    """A copy of a cell has another seed or other settings; a study that was moved as a whole has not."""
    path = ended(tmp_path)
    moved = shutil.move(tmp_path / "study", tmp_path / "moved")
    assert told(path, "--dir", moved)["arms"]
    cells = [tmp_path / "moved/cells" / cell.name for cell in study_and_cells(path)[1]]
    shutil.rmtree(cells[0])
    shutil.copytree(cells[-1], cells[0])
    for command in ("report", "status", "run"):
        refused = ablate(command, path, "--dir", moved, *(["--local"] if command == "run" else []))
        assert refused.exit_code == exitcodes.USAGE
        assert "run.seed" in refused.output and f"{cells[0]}/cell.toml is not of arm" in refused.output


def test_cells_that_are_left_out_are_told(tmp_path: Path) -> None:
    """Seeds that were removed after the run, and a folder that is not there."""
    path = ended(tmp_path)
    path.write_text(path.read_text().replace("seeds = 8", "seeds = 7"))
    for command in ("report", "status"):
        assert "2 cells in" in ablate(command, path).output
        assert "does not exist" in ablate(command, path, "--dir", tmp_path / "nowhere").output


@pytest.mark.parametrize("loss", ['"3.0"', "true", "1e308", "null"])
def test_a_loss_that_is_no_number_counts_as_none(tmp_path: Path, loss: str) -> None:
    """The cell has failed; the report on the others stands."""
    path = ended(tmp_path)
    metrics = study_and_cells(path)[1][-1].folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines[:-1], re.sub(r'"loss": [^,}]+', f'"loss": {loss}', lines[-1])]) + "\n")
    (arm,) = told(path)["arms"]  # type: ignore[misc]
    assert arm["verdict"] in ("better", "undecided") and '"loss": ' + loss in metrics.read_text()


def test_a_run_whose_losses_are_lost_has_not_failed(tmp_path: Path) -> None:
    """It makes no pair, and the report says what to do. It also says if the record of the code is missing."""
    path = ended(tmp_path)
    last = study_and_cells(path)[1][-1]
    (last.folder / "metrics.jsonl").unlink()
    shown = ablate("report", path).output
    assert "the arm failed" not in shown and f"cell {last.name} does not count: metrics.jsonl lacks 2 of" in shown
    assert "origin.json is missing" in shown
    status = json.loads(ablate("status", path, "--json", "-").stdout)["cells"]
    assert [cell["state"] for cell in status].count("done") == len(status) - 1
    assert (status[-1]["state"], status[-1]["job"]) == ("refused", None) and "put its own back" in status[-1]["reason"]


def longer(folder: Path, _other: Path) -> None:
    metrics = folder / "metrics.jsonl"
    metrics.write_text(
        metrics.read_text() + re.sub(r'"step": \d+', '"step": 9999', metrics.read_text().splitlines()[-1])
    )


def without_losses(folder: Path, _other: Path) -> None:
    (folder / "steps.jsonl").unlink()
    metrics = folder / "metrics.jsonl"
    metrics.write_text(re.sub(r'"loss": [^,}]+, ', "", metrics.read_text()))


def foreign_metrics(folder: Path, other: Path) -> None:
    shutil.copy(other / "metrics.jsonl", folder)


def foreign_run(folder: Path, other: Path) -> None:
    for name in ("events.jsonl", "metrics.jsonl", "steps.jsonl"):
        shutil.copy(other / name, folder)


def foreign_claims(folder: Path, other: Path) -> None:
    shutil.rmtree(folder / "generations")
    shutil.copytree(other / "generations", folder / "generations")


def no_events(folder: Path, _other: Path) -> None:
    (folder / "events.jsonl").unlink()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (longer, "metrics.jsonl has step 9999, and the run ends at 20"),
        (without_losses, "metrics.jsonl lacks 2 of its last 2 steps"),
        (foreign_metrics, "at step 20, where steps.jsonl has"),
        (foreign_run, "events.jsonl is of run"),
        (foreign_claims, "generations is of"),
        (no_events, "is not a run folder: events.jsonl"),
    ],
)
def test_records_that_are_not_the_cells_own_do_not_count(
    tmp_path: Path, damage: Callable[[Path, Path], None], why: str
) -> None:
    """A copy from another cell gives no verdict. The cell has ended, so it is not run again."""
    path = ended(tmp_path)
    cells = study_and_cells(path)[1]
    damage(cells[-1].folder, cells[0].folder)
    shown = ablate("report", path).output
    assert f"cell {cells[-1].name} does not count: " in shown and why in shown
    before = sorted(cells[-1].folder.iterdir())
    again = CliRunner().invoke(cli, ["ablate", "run", str(path), "--local"], standalone_mode=False)
    assert again.return_value == exitcodes.FAILED and "does not count" in again.output
    assert sorted(cells[-1].folder.iterdir()) == before


def test_a_folder_without_its_settings_is_nobodys(tmp_path: Path) -> None:
    """It may be a copy of another cell, from which the refused settings were removed."""
    path = ended(tmp_path)
    (study_and_cells(path)[1][-1].folder / "cell.toml").unlink()
    for command in ("report", "status", "run"):
        refused = ablate(command, path, *(["--local"] if command == "run" else []))
        assert refused.exit_code == exitcodes.USAGE and "remove the folder" in refused.output


def test_a_cost_that_is_not_whole_says_so(tmp_path: Path) -> None:
    """The losses count, the cost does not."""
    path = ended(tmp_path)
    last = study_and_cells(path)[1][-1]
    (last.folder / "events.jsonl").write_text("no JSON\n")
    shown = ablate("report", path).output
    assert f"the cost of cell {last.name} is not whole: 1 line of events.jsonl cannot be read" in shown


@pytest.mark.parametrize("name", ["study.toml", "base.toml", "promotions.jsonl", "study/origin.json"])
def test_a_report_is_not_written_over_what_it_rests_on(tmp_path: Path, name: str) -> None:
    """Also not over the baseline."""
    path = ended(tmp_path)
    source = read_study(path).source
    (tmp_path / "base.toml").write_bytes(source.read_bytes())
    path.write_text(re.sub(r'baseline = "[^"]*"', 'baseline = "base.toml"', path.read_text()))
    before = (tmp_path / "base.toml").read_bytes()
    refused = ablate("report", path, "--json", tmp_path / name)
    assert refused.exit_code == exitcodes.USAGE and "belongs to the study" in refused.output
    assert (tmp_path / "base.toml").read_bytes() == before


@pytest.mark.parametrize("command", ["run", "status", "report", "stop"])
def test_a_study_that_cannot_be_used_is_one_sentence(tmp_path: Path, command: str) -> None:
    """Nothing is started."""
    result = ablate(command, make_study(tmp_path, '[arm.long]\nset = ["run.steps=40"]\n'))
    assert result.exit_code == exitcodes.USAGE
    assert result.output.startswith(f"opsd: {tmp_path}/study.toml: arm long: tokens") and result.output.count("\n") == 1
    assert "cannot be read" in ablate(command, tmp_path / "none.toml").output
