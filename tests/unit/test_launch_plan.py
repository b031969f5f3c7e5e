"""A run of the included trainer has its plan in its folder from the start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.commands.launch_settings import plan_command
from opsd.commands.main import cli
from opsd.launch.ranks.settings import Program
from opsd.ledger.records import PLAN
from opsd.plan.forecast import Planned

H100 = "NVIDIA H100 80GB HBM3"
TRAINER = Program(
    "module", "opsd.trainer", ("--set", "parallel.tp=2", "--fresh", "--", "smollm3-3b"), "python", Path("/")
)


def proc(folder: Path, model: str) -> str:
    """A /proc with the driver's list of one GPU."""
    information = folder / "proc/driver/nvidia/gpus/0000:18:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 152\n", encoding="utf-8")
    return str(folder / "proc")


def test_the_command_keeps_a_plan_of_the_layout_that_runs(tmp_path: Path) -> None:
    """And no second one: what a run was begun with is what it is compared with. A user's modules are not imported."""
    run, root = tmp_path / "run", proc(tmp_path, H100)
    (tmp_path / "tomllib.py").write_text("raise SystemExit('of the user')", encoding="utf-8")
    words = plan_command(TRAINER, run, 384, root)
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=tmp_path, env=environ)
    kept = Planned.parse((run / PLAN).read_text(encoding="utf-8"))
    assert (kept.gpus, kept.nodes) == (384, 48)
    assert plan_command(TRAINER, run, 384, root) == []


@pytest.mark.parametrize(("program", "model"), [
    (TRAINER, "NVIDIA GeForce RTX 4090"),
    (Program("script", "/home/me/train.py", ("smollm3-3b",), "python", Path("/")), H100),
    (Program("module", "torchtitan.train", (), "python", Path("/")), H100),
])  # fmt: skip
def test_nothing_is_planned_that_is_not_known(tmp_path: Path, program: Program, model: str) -> None:
    """Neither of other programs nor on other GPUs."""
    assert plan_command(program, tmp_path, 8, proc(tmp_path, model)) == []


def test_nothing_is_planned_without_a_gpu(tmp_path: Path) -> None:
    """On a CPU a plan for GPUs would be no yardstick."""
    assert plan_command(TRAINER, tmp_path, 8, str(tmp_path)) == []


def test_a_launcher_starts_without_what_reads_a_plan() -> None:
    """Pydantic takes 80 ms and 8 MiB, on every node."""
    code = "import sys, opsd.commands.launch; print('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def planned(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["plan", *words, "--measured", "none", "--json", "-"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_a_plan_as_it_is_has_one_layout() -> None:
    """That of the run, although others are faster."""
    plan = planned("smollm3-3b", "--as-is", "--gpus", "384", "--set", "parallel.tp=2")
    assert [each["layout"]["tp"] for each in plan["layouts"]] == [2]
    assert [point["gpus"] for point in plan["curve"]] == [384]
    assert plan["days"] > planned("smollm3-3b", "--gpus", "384")["days"]


@pytest.mark.parametrize(("words", "code", "said"), [
    (["smollm3-3b", "--as-is"], exitcodes.USAGE, "it needs --gpus"),
    (["smollm3-3b", "--as-is", "--gpus", "7"], exitcodes.FAILED, "the layout of the run cannot be planned: data.batch"),
])  # fmt: skip
def test_what_cannot_be_planned_as_it_is_has_a_sentence(words: list[str], code: int, said: str) -> None:
    """With what is missing."""
    result = CliRunner().invoke(cli, ["plan", *words])
    assert (result.exit_code, said in result.stderr) == (code, True), result.stderr
