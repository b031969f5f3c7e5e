"""The engine of preflight with real child processes, and the Python in which checks run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from opsd import __version__
from opsd.preflight.base import Context, Verdict
from opsd.preflight.checks import CHECKS, gpu_burn
from opsd.preflight.command import ensure_torch
from opsd.preflight.engine import NO_RUN, CheckRun, SelectionError, run, unmet_need
from opsd.preflight.report import Report, Result
from opsd.preflight.training import demand_by, demand_of
from opsd.preflight.view import PlainView
from opsd.settings.sections import PreflightSettings
from tests.fakes import preflight as fake
from tests.fakes.clock import eventually
from tests.fakes.preflight import with_gpu
from tests.fakes.tree import ROOT

pytest.importorskip("torch")


# The engine with real child processes: checks that answer, misbehave, hang, and are interrupted.


@pytest.fixture(autouse=True)
def real_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have left simulated ones in the environment; children find the fakes."""
    monkeypatch.delenv("OPSD_SIMULATED_NVML", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Recorder:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.progressed: list[tuple[str, float, str]] = []
        self.ended: list[Result] = []

    def started(self, check) -> None:
        self.began.append(check.name)

    def progress(self, check, share: float, subject: str) -> None:
        self.progressed.append((check.name, share, subject))

    def finished(self, result: Result) -> None:
        self.ended.append(result)


def job(folder: Path, *checks, **options) -> CheckRun:
    context = Context(
        "node-1", "quick", 0.0, settings=PreflightSettings(local_dir=str(folder / "pids")), sys=str(folder / "sys")
    )
    return CheckRun(checks, replace(context, **options.pop("context", {})), folder, **options)


def report_of(folder: Path, *checks, **options) -> Report:
    return asyncio.run(run(job(folder, *checks, **options), Recorder()))


def test_every_way_to_answer_becomes_its_verdict(tmp_path: Path):
    """Pass, warn, fail, not applicable and could not run arrive as what they are, in the order of the plan."""
    checks = (fake.SPEED_ONE, fake.GOOD, fake.WARNS, fake.FAILS, fake.NOT_APPLICABLE, fake.COULD_NOT_RUN)
    listener = Recorder()
    report = asyncio.run(run(job(tmp_path, *checks), listener))
    assert [(r.check, r.verdict.value) for r in report.results] == [
        ("speed_one", "pass"),
        ("good", "pass"),
        ("warns", "warn"),
        ("fails", "fail"),
        ("not_applicable", "not_applicable"),
        ("could_not_run", "could_not_run"),
    ]
    assert not report.passed and not report.interrupted
    assert listener.began[-1] == "speed_one", "what measures a speed runs after all others"
    assert ("good", 0.5, "GPU 0") in listener.progressed
    assert report.results[1].facts == {"color": "blue"}
    assert "libraries print what they like" in Path(report.results[1].log).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (fake.RAISES, "exit code 1 and no result: ZeroDivisionError: division by zero"),
        (fake.KILLED, "it was killed by SIGKILL"),
        (fake.COULD_NOT_RUN, "the tool is missing; install it"),
    ],
)
def test_a_check_that_dies_could_not_run_and_fails_the_node(tmp_path: Path, check, reason: str):
    """No result is not a good result, and the sentence says how the check ended."""
    report = report_of(tmp_path, fake.GOOD, check)
    assert report.results[1].verdict is Verdict.COULD_NOT_RUN
    assert reason in report.results[1].reason
    assert not report.passed


def test_the_out_of_memory_killer_is_named(tmp_path: Path):
    """SIGKILL while the kernel's counter goes up is the out-of-memory killer."""
    (tmp_path / "vmstat").write_text("oom_kill 3\n", encoding="ascii")
    report = report_of(tmp_path, fake.OUT_OF_MEMORY, context={"proc": str(tmp_path)})
    assert "out-of-memory killer" in report.results[0].reason


def test_a_check_that_measures_nothing_could_not_run(tmp_path: Path):
    """An answer without the required measurement is no pass."""
    assert report_of(tmp_path, fake.MEASURES_NOTHING).results[0].verdict is Verdict.COULD_NOT_RUN


def test_an_optional_check_may_be_unable_to_run(tmp_path: Path):
    """It is shown as such and does not fail the node."""
    report = report_of(tmp_path, fake.GOOD, fake.COULD_NOT_RUN, optional=frozenset({"could_not_run"}))
    assert report.passed
    assert report.results[1].verdict is Verdict.COULD_NOT_RUN


def test_an_optional_check_that_fails_still_fails_the_node(tmp_path: Path):
    """Optional is about not knowing, not about ignoring what is known."""
    assert not report_of(tmp_path, fake.GOOD, fake.FAILS, optional=frozenset({"fails"})).passed


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text(encoding="ascii").split()]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_hanging_check_is_ended_at_its_deadline_with_its_children(tmp_path: Path):
    """It ignores SIGTERM and has a child in another process group; both are gone and the last words are told."""
    report = report_of(tmp_path, fake.HANGS, grace_s=3.0)
    assert report.results[0].reason == ("it did not finish within 3 s: waiting for a driver that never answers")
    assert len(pids(tmp_path)) == 2
    assert eventually(lambda: all(gone(pid) for pid in pids(tmp_path)))


def test_an_interrupted_run_leaves_a_partial_report_and_no_process(tmp_path: Path):
    """What was done before stays, what was not is marked, every child is gone."""

    async def interrupt() -> Report:
        task = asyncio.create_task(run(job(tmp_path, fake.GOOD, fake.HANGS, fake.SPEED_ONE), listener))
        while not (listener.ended and (tmp_path / "pids").exists()):
            await asyncio.sleep(0.01)
        task.cancel()
        return await task

    listener = Recorder()
    report = asyncio.run(interrupt())
    assert report.interrupted and not report.passed
    assert [r.verdict.value for r in report.results] == ["pass", "could_not_run", "could_not_run"]
    assert report.results[1].reason == "interrupted before it was done"
    assert eventually(lambda: all(gone(pid) for pid in pids(tmp_path)))


def test_a_check_that_is_ended_removes_what_it_made(tmp_path: Path):
    """Storage tests and drills make gigabytes; neither a deadline nor Ctrl-C may leave them on the disk."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    report = report_of(
        tmp_path, fake.LEAVES_FILES, context={"settings": PreflightSettings(local_dir=str(folder))}, grace_s=1.0
    )
    assert "did not finish within" in report.results[0].reason
    assert [*folder.iterdir()] == []


def test_a_check_that_needs_gpus_does_not_apply_where_there_are_none(tmp_path: Path):
    """A laptop without a GPU is no broken GPU node."""
    report = report_of(tmp_path, fake.GOOD, fake.NEEDS_GPU)
    assert report.results[1].verdict is Verdict.NOT_APPLICABLE
    assert report.passed


def test_a_node_that_must_have_gpus_and_shows_none_fails(tmp_path: Path):
    """Green because the driver is gone is what this must never be."""
    report = report_of(tmp_path, fake.NEEDS_GPU, context={"settings": PreflightSettings(gpus=8)})
    assert (report.results[0].verdict, report.word) == (Verdict.FAIL, "unfit")
    assert "must have 8 GPUs" in report.results[0].reason


def test_a_gpu_on_the_pci_bus_is_enough_to_run_the_check(tmp_path: Path):
    """Whether the driver sees the GPU is for the check to find out."""
    with_gpu(tmp_path / "sys")
    assert report_of(tmp_path, fake.NEEDS_GPU).results[0].verdict is Verdict.PASS


def test_a_check_of_the_run_does_not_apply_where_none_was_named(tmp_path: Path):
    """And needs no process to find that out."""
    listener = Recorder()
    (result,) = asyncio.run(run(job(tmp_path, fake.OF_THE_RUN), listener)).results
    assert (result.verdict, result.reason) == (Verdict.NOT_APPLICABLE, NO_RUN)
    assert report_of(tmp_path, fake.OF_THE_RUN, context={"train": "tiny"}).passed


def test_a_check_that_needs_root_could_not_run_without():
    """It is not even started and says how to run it."""
    check = replace(fake.GOOD, needs=frozenset({"root"}))
    answer = unmet_need(check, Context("node-1", "quick", 0.0), root=False)
    assert answer is not None
    assert answer.verdict is Verdict.COULD_NOT_RUN
    assert "sudo" in str(answer)
    assert unmet_need(check, Context("node-1", "quick", 0.0), root=True) is None


def test_a_preflight_in_which_nothing_ran_has_not_passed(tmp_path: Path):
    """All checks not applicable is not a pass."""
    assert not report_of(tmp_path, fake.NOT_APPLICABLE).passed


# The Python in which checks that need torch run, with real interpreters: this one, and one that has opsd alone.


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
