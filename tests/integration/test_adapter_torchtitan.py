"""The trainer for torchtitan, in the real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.checkpoints.claims import Claim, create
from opsd.rank_page import RankPage, read_page, write_request
from tests.fakes.adapter_ranks import tokens_of_ranks
from tests.fakes.clock import until
from tests.fakes.tree import ROOT

PYTHON = ROOT / ".venv-torchtitan" / "bin" / "python"
PROGRAM = ROOT / "tests" / "fakes" / "torchtitan_cpu.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="torchtitan needs a newer torch than ours: make torchtitan"),
]


def start(folder: Path, page: Path, steps: int, **more: str) -> subprocess.Popen[str]:
    environ = os.environ | {"OPSD_RANK_PAGE": str(page), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more
    command = [PYTHON, PROGRAM, str(folder), str(steps)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(program: subprocess.Popen[str], page: Path) -> RankPage:
    output, _ = program.communicate(timeout=120)
    assert program.returncode == 0, output[-3000:]
    return read_page(page)


def test_a_training_fills_its_page(tmp_path: Path) -> None:
    """Steps, tokens over accumulated batches, losses, phases and saves of a real torchtitan are there."""
    path = tmp_path / "rank-0000.page"
    page = finish(start(tmp_path, path, 4), path)
    assert (page.state, page.steps_reported, page.committed_step) == ("finished", 4, 4)
    assert [step.step for step in page.steps] == [1, 2, 3, 4]
    assert page.tokens == 4 * 4 * 64
    assert 5 < page.steps[-1].loss < 12
    assert page.steps[-1].grad_norm > 0
    assert page.steps[0].learning_rate == pytest.approx(8e-4 / 2)
    assert all(page.steps[-1].phase(name) > 0 for name in ("data", "forward", "optimizer"))
    assert page.steps[3].phase("checkpoint") > page.steps[2].phase("checkpoint") == 0


def test_a_stop_is_a_save_and_an_orderly_end(tmp_path: Path) -> None:
    """Asked to stop, torchtitan saves all the state of the step it is at, and goes on from there."""
    path = tmp_path / "rank-0000.page"
    program = start(tmp_path, path, 100_000)
    until(lambda: path.exists() and read_page(path).steps_reported >= 2)
    write_request(path, "checkpoint_and_stop")
    stopped = finish(program, path)
    assert stopped.state == "finished"
    assert stopped.committed_step == stopped.steps[-1].step
    resumed = finish(start(tmp_path, path, stopped.committed_step + 2), path)
    assert [step.step for step in resumed.steps] == [stopped.committed_step + 1, stopped.committed_step + 2]


def test_what_has_been_overtaken_saves_no_more(tmp_path: Path) -> None:
    """The run goes on elsewhere after the first steps: nothing is saved any more, exit code 76 and a sentence."""
    path = tmp_path / "rank-0000.page"
    assert create(tmp_path, Claim(1, "a start", "n1 7"))
    program = start(tmp_path, path, 100_000, OPSD_RUN_DIR=str(tmp_path), OPSD_GENERATION="1")
    until(lambda: path.exists() and (read_page(path).committed_step or 0) >= 3)
    assert create(tmp_path, Claim(2, "a start", "n2 8"))
    output, _ = program.communicate(timeout=120)
    assert program.returncode == exitcodes.FENCED, output[-3000:]
    assert "generation 2 of the run has begun elsewhere; generation 1 may not write any more" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("degree", ["data_parallel_replicate", "tensor_parallel", "pipeline_parallel"])
def test_ranks_count_their_own_tokens(tmp_path: Path, degree: str) -> None:
    """Two ranks that share the batches, or compute one together: the sum of the pages is what was trained on."""
    pages = tokens_of_ranks(tmp_path, [PROGRAM, str(tmp_path), "2", f"{degree}_degree"], python=PYTHON)
    assert pages == [2 * 4 * 64 // 2] * 2
