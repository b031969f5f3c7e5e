"""The Python in which checks that need torch run, with real interpreters: this one, and one that has opsd alone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from opsd import __version__
from opsd.preflight.base import Context, Verdict
from opsd.preflight.checks import CHECKS, gpu_burn
from opsd.preflight.command import ensure_torch
from opsd.preflight.engine import CheckRun, SelectionError, run, unmet_need
from opsd.preflight.training import demand_by, demand_of
from opsd.preflight.view import PlainView
from opsd.settings.sections import PreflightSettings
from tests.fakes import preflight_checks as fake
from tests.fakes.preflight_node import with_gpu

pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def real_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have left simulated ones in the environment; children find the fakes."""
    monkeypatch.delenv("OPSD_SIMULATED_NVML", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def node(tmp_path: Path) -> Context:
    """A node with one GPU."""
    with_gpu(tmp_path / "sys")
    return Context("node-1", "quick", 0.0, sys=str(tmp_path / "sys"))


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has opsd and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return str(folder / "bin/python")


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="ascii")
    path.chmod(0o755)
    return str(path)


def test_a_missing_torch_is_said_with_what_mends_it(node: Context, without_torch: str):
    """Every check of the profile that needs it is in the sentence, ready to be pasted."""
    quick = [check for check in CHECKS if "quick" in check.seconds]
    with pytest.raises(SelectionError) as said:
        ensure_torch(without_torch, quick, node)
    assert str(said.value) == (
        f"torch is not installed in {without_torch}: install it with `deploy/install --train`, name the Python of the "
        "training in preflight.python, or leave out what needs it with "
        "--skip gpu_burn,gpu_memory,gpu_host_copy,gpu_peer,collectives"
    )


def test_torch_is_asked_for_only_where_something_would_use_it(node: Context, without_torch: str, tmp_path: Path):
    """Not on a node without a GPU, not for a run that was not named, and not by a check that is optional."""
    bare = Context("node-1", "quick", 0.0, sys=str(tmp_path / "none"))
    ensure_torch("/no/python", CHECKS, bare)
    ensure_torch("/no/python", [fake.OF_THE_RUN], node)
    ensure_torch(without_torch, [fake.NEEDS_TORCH], node, optional=["needs_torch"])
    ensure_torch(sys.executable, CHECKS, node)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 1", "has no opsd that works"),
        ("echo 0.0.0 True", f"has opsd 0.0.0; install opsd {__version__} there, as it is here"),
    ],
)
def test_an_interpreter_without_this_opsd_is_said(node: Context, tmp_path: Path, text: str, said: str):
    """Its checks would answer in a language of their own."""
    with pytest.raises(SelectionError, match=said):
        ensure_torch(program(tmp_path / "python", text), [gpu_burn.CHECK], node)
    with pytest.raises(SelectionError, match="cannot be started: No such file"):
        ensure_torch(str(tmp_path / "none"), [gpu_burn.CHECK], node)


def test_only_checks_that_need_torch_run_in_the_training_s_python(node: Context, tmp_path: Path):
    """The others stay with opsd's own."""
    other = program(tmp_path / "python", f'echo used >>"{tmp_path}/log"; exec "{sys.executable}" "$@"')
    job = CheckRun((fake.GOOD, fake.NEEDS_TORCH), node, tmp_path, python=other)
    report = asyncio.run(run(job, PlainView(Console(quiet=True))))
    assert [result.verdict for result in report.results] == [Verdict.PASS, Verdict.PASS]
    assert (tmp_path / "log").read_text(encoding="ascii").split() == ["used"]


def test_the_training_s_python_tells_what_the_run_asks_of_the_node(tmp_path: Path, without_torch: str):
    """The storage is judged by it; opsd's own Python need not have the trainer, and one that has not knows nothing."""
    run_of_one_node = Context(
        "node-1", "quick", 0.0, train="smollm3-3b", settings=PreflightSettings(gpus=8), overrides=("data.shards=/data",)
    )
    other = program(tmp_path / "python", f'exec "{sys.executable}" "$@"')
    demand = demand_by(other, run_of_one_node)
    assert demand.checkpoint_bytes and demand == demand_of(run_of_one_node)
    assert demand_by(without_torch, run_of_one_node) == run_of_one_node.demand


def test_a_driver_library_that_is_named_makes_no_gpu_simulated(node: Context):
    """With nvml.library set the GPUs of a real node are still burned."""
    named = Context("node-1", "quick", 0.0, sys=node.sys, nvml_library="/usr/lib/libnvidia-ml.so.1")
    assert unmet_need(gpu_burn.CHECK, named, root=True) is None


def test_simulated_gpus_are_not_burned(node: Context, monkeypatch: pytest.MonkeyPatch):
    """They answer questions and cannot compute."""
    monkeypatch.setenv("OPSD_SIMULATED_NVML", "/anywhere")
    answer = unmet_need(gpu_burn.CHECK, node, root=True)
    assert answer is not None and answer.verdict is Verdict.NOT_APPLICABLE


def test_the_command_measures_nothing_without_torch(tmp_path: Path, without_torch: str):
    """Exit code 2 and one sentence: the installation is wrong, not the node."""
    environment = {**os.environ, "OPSD_STATE_DIR": str(tmp_path / "state"), "OPSD_CONFIG": os.devnull}
    options = ["--train=tiny", "--only=numa,run_config", f"--set=preflight.python={without_torch}"]
    command = [sys.executable, "-m", "opsd", "preflight", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"opsd: torch is not installed in {without_torch}:")
    assert done.stderr.endswith("--skip run_config\n")
