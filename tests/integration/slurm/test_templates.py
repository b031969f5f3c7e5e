"""The templates on a real Slurm, as an ordinary user: one launcher a node, and the job ends as the run says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import Job
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until
from tests.integration.slurm.templates import FOLDER, USER, adapted

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow]

TEMPLATES = sorted(path.name for path in FOLDER.glob("train-*.sbatch"))
OPSD = """#!/bin/sh
# opsd with another launcher, one that does what the test says.
export PYTHONPATH={path} HOME={folder}
[ "$1" = launch ] && shift && exec {python} -m tests.integration.slurm.stand_in "$@"
exec {python} -m opsd "$@"
"""
VALUES = {
    "train-requeue.sbatch": {},
    "train-spares.sbatch": {"nodes": "2-3", "NODES": "2", "SPARES": "1"},
    "train-pool.sbatch": {"POOL": "dev", "WAIT": "60"},
}

SMALL = ["--nnodes", "2", "--spares", "0"]


class Submitted:
    """A template as its user has adapted it, running on three nodes."""

    def __init__(self, cluster: Cluster, template: str, *options: str, name: str = "train") -> None:
        self.cluster = cluster
        self.folder = cluster.shared / f"{template.partition('.')[0]}-{len(list(cluster.shared.iterdir()))}"
        self.folder.mkdir()
        self.folder.chmod(0o777)
        opsd = self.folder / "opsd"
        opsd.write_text(OPSD.format(path=":".join(sys.path), folder=self.folder, python=sys.executable))
        opsd.chmod(0o755)
        values = {"nodes": "3", **VALUES[template]}
        script = adapted(
            template, gpus_per_node="", time="1:00:00", RANKS="1", RUNS=str(self.folder / "runs"),
            OPSD=str(opsd), PROGRAM="(train.py)", job_name=f"'{name}'", **values,
        )  # fmt: skip
        self.slurm = CommandSlurm(runner_on(cluster.controller, USER))
        given = ("--exclude=n4",)  # n1 to n3: what a release does with a node that has been away differs
        self.id = self.slurm.submit(script, [f"--chdir={self.folder}", "--output=job.out", *given, *options])

    @property
    def run(self) -> Path:
        """The folder of the run; there is one."""
        (found,) = (self.folder / "runs").iterdir()
        return found

    def began(self, launchers: int = 3) -> None:
        """Wait for the launchers."""
        self.until(lambda: len(self.calls()) == launchers, f"{launchers} launchers run")

    def until(self, condition: Callable[[], object], what: str, timeout: float = 120.0) -> None:
        """Wait for something; what the job has said is told if it does not come."""
        try:
            wait_until(condition, what, timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; the job is {self.job()} and has said: {self.said()}") from error

    def calls(self) -> list[tuple[str, list[str]]]:
        """On which nodes launchers were started, and with which arguments."""
        path = self.folder / "calls"
        lines = sorted(path.read_text().splitlines()) if path.exists() else []
        return [(node, json.loads(told)) for node, _, told in (line.partition(" ") for line in lines)]

    def answer(self, *nodes: str, **told: Any) -> None:
        """Let the launchers of these nodes leave."""
        for node in nodes:
            draft = self.folder / f".answer-{node}"
            draft.write_text(json.dumps(told))
            draft.rename(self.folder / f"answer-{node}")

    def steps(self) -> int:
        """How many launchers run."""
        shown = self.cluster.controller.run("squeue", "--steps", "--noheader", f"--jobs={self.id}").stdout
        return len([line for line in shown.splitlines() if ".batch" not in line and ".extern" not in line])

    def job(self) -> Job | None:
        """The job while it waits or runs."""
        return next(iter(self.slurm.jobs([self.id])), None)

    def signal(self, *options: str) -> None:
        """What scancel does with these options."""
        self.cluster.controller.run("scancel", *options, str(self.id), user=USER)

    def said(self) -> str:
        """The job's log."""
        return "".join(
            path.read_text() for path in [self.folder / "job.out", *self.folder.rglob("*.log")] if path.exists()
        )

    def outcome(self, timeout: float = 120.0) -> str:
        """How the job has ended: its state and exit code."""
        self.until(lambda: self.job() is None, "the job has ended", timeout)
        shown = self.cluster.controller.run("scontrol", "show", "job", str(self.id), "--oneliner").stdout
        values = dict(word.partition("=")[::2] for word in shown.split())
        return f"{values['JobState']} {values['ExitCode']}"

    def requeued(self) -> bool:
        """True once the job runs again."""
        job = self.job()
        return job is not None and job.state == "running" and job.restarts == 1


Submit = Callable[..., Submitted]


@pytest.fixture
def submit(cluster: Cluster) -> Submit:
    """Start a template."""
    return lambda template, *options, **more: Submitted(cluster, template, *options, **more)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_settings_and_one_command(template: str) -> None:
    """Bash can read it, it asks for all that a run needs to outlive its nodes, and has no logic of its own."""
    subprocess.run(["bash", "-n", FOLDER / template], check=True)
    lines = (FOLDER / template).read_text().splitlines()
    asked = {line.split()[1].partition("=")[0] for line in lines if line.startswith("#SBATCH")}
    assert {"--no-kill", "--requeue", "--signal", "--open-mode", "--nodes", "--output"} <= asked
    *settings, command = [line for line in lines if line and not line.startswith("#")]
    assert command.startswith('exec "$OPSD" slurm run ')
    assert all("=" in line.split("#")[0] for line in settings)


@pytest.mark.parametrize("template", TEMPLATES)
def test_one_launcher_a_node_and_a_good_end(submit: Submit, template: str) -> None:
    """All get the same arguments; the job ends when the run says that it is done, whatever steps are left."""
    run = submit(template)
    run.began()
    assert [node for node, _ in run.calls()] == ["n1", "n2", "n3"]
    ((told),) = {tuple(told) for _, told in run.calls()}
    assert told[:2] == ("--nodes", "n[1-3]")
    assert told[told.index("--nnodes") + 1] == ("2" if template == "train-spares.sbatch" else "3")
    assert told[-3:] == ("--nproc-per-node", "1", "train.py")
    run.answer("n2", "n3", exit=0)
    run.answer("n1", exit=0, end=0)
    assert run.outcome() == "COMPLETED 0:0"


def test_a_step_that_is_over_is_not_the_end(submit: Submit, cluster: Cluster) -> None:
    """Up to Slurm 22.05 srun says 0 of a step whose node has died: two of three, and the run goes on."""
    run = submit("train-requeue.sbatch")
    run.began()
    try:
        cluster.nodes["n3"].power_off()
        CommandSlurm(runner_on(cluster.controller)).update_nodes(["n3"], "down", "opsd:test")
        run.answer("n2", exit=0)
        run.until(lambda: run.job() is not None and run.steps() < 3, "one launcher has left")
        run.answer("n1", exit=0, end=0, lost=["n3"])
        assert run.outcome() == "COMPLETED 0:0"
    finally:
        cluster.restore()


def test_without_a_last_word_the_job_runs_again_and_not_for_ever(submit: Submit) -> None:
    """All launchers are gone and none has said why: twice more, and the job's log says so."""
    run = submit("train-requeue.sbatch")
    run.began()
    run.answer("n1", "n2", "n3", "n4", exit=0)
    assert run.outcome() == "FAILED 1:0"
    assert len(run.calls()) == 9
    assert run.said().count("all launchers are gone and none has said why (n") == 3
    assert "start 3 in a row without an outcome and without progress; giving up" in run.said()


def test_saved_and_stopped_is_requeued(submit: Submit) -> None:
    """75 as the last word puts the job back into the queue, where it starts at once; one launcher's exit does not."""
    run = submit("train-spares.sbatch")
    run.began()
    run.answer("n1", exit=75)
    wait_until(lambda: run.steps() == 2, "one launcher has left")
    assert len(run.calls()) == 3
    run.answer("n2", exit=75)
    run.answer("n3", exit=75, end=75)
    run.until(lambda: (job := run.job()) is not None and job.restarts == 1, "the job was put back")
    for node in ("n1", "n2", "n3"):
        (run.folder / f"answer-{node}").unlink()
    run.until(run.requeued, "the job runs again")


def test_a_requeue_does_not_wait_for_spares(submit: Submit, cluster: Cluster) -> None:
    """It asked for two to three nodes, and two are left: it trains on them."""
    run = submit("train-spares.sbatch")
    run.began()
    try:
        CommandSlurm(runner_on(cluster.controller)).update_nodes(["n3", "n4"], "drain", "opsd:test")
        run.answer("n1", "n2", "n3", exit=75, end=75)
        run.until(lambda: (job := run.job()) is not None and job.restarts == 1, "the job was put back")
        for node in ("n1", "n2", "n3"):
            (run.folder / f"answer-{node}").unlink()
        run.until(run.requeued, "the job runs again")
        run.began(5)
        again = [(node, told) for node, told in run.calls() if told[:2] == ["--nodes", "n[1-2]"]]
        assert [node for node, _ in again] == ["n1", "n2"]
        assert all(told[told.index("--nnodes") : told.index("--wait-for-node")] == SMALL for _, told in again)
        run.answer("n1", "n2", exit=0, end=0)
        assert run.outcome() == "COMPLETED 0:0"
    finally:
        cluster.restore()


def test_a_failure_ends_the_job(submit: Submit) -> None:
    """It is not run again, and Slurm knows the run's exit code; it is no hold either."""
    run = submit("train-requeue.sbatch")
    run.began()
    run.answer("n1", "n2", "n3", exit=70, end=70)
    assert run.outcome() == "FAILED 70:0"


def test_a_job_name_with_blanks_and_umlauts(submit: Submit) -> None:
    """The run gets a name that it may have."""
    run = submit("train-requeue.sbatch", name="mein großer Lauf")
    run.began()
    assert run.run.name.startswith("mein-groer-Lauf-")
    run.answer("n1", "n2", "n3", exit=0, end=0)
    assert run.outcome() == "COMPLETED 0:0"


def test_a_spare_is_fetched_for_a_lost_node(submit: Submit, cluster: Cluster) -> None:
    """All nodes read of the loss and one asks; the launcher on the spare is given the run, its nodes and its job."""
    run = submit("train-pool.sbatch")
    run.began()
    with (run.run / "events.jsonl").open("a") as file:
        file.write('{"run": "train", "node": "n1", "event": "node_lost", "lost": "n4", "ranks": false}\n')
        file.write('{"run": "train", "node": "n1", "event": "node_lost", "lost": "n2", "ranks": true}\n')
    run.began(4)
    assert [node for node, _ in run.calls()] == ["n1", "n2", "n3", "n4"]
    first, spare = run.calls()[0][1], run.calls()[3][1]
    assert spare == [first[0], "n1,n2,n3,n4", *first[2:]]
    job = json.loads((run.folder / "job-n4").read_text())
    expected = {"SLURM_JOB_ID": str(run.id), "SLURM_JOB_NODELIST": "n1,n2,n3", "SLURM_RESTART_COUNT": "0"}
    assert {name: job[name] for name in expected} == expected
    (asked,) = (run.run / "spares").iterdir()
    assert (
        f"job {json.loads(asked.read_text())['job']} will add a spare to the run" in (run.run / "job.log").read_text()
    )
    run.answer("n1", "n2", "n3", "n4", exit=0, end=0)
    assert run.outcome() == "COMPLETED 0:0"
    wait_until(lambda: not run.slurm.jobs(), "the spare's job has ended")


@pytest.mark.parametrize(
    "options",
    [*product(("--full", "--batch"), ("--signal=USR1", "--signal=TERM")), ("--signal=USR1",)],
    ids=" ".join,
)
def test_a_signal_stops_the_run_and_has_it_run_again(submit: Submit, options: tuple[str, ...]) -> None:
    """To whom it may be sent: each launcher gets one, since a second would have it wait less long."""
    run = submit("train-requeue.sbatch")
    run.began()
    nodes = [node for node, _ in run.calls()]
    run.signal(*options)
    run.until(lambda: (job := run.job()) is not None and job.restarts == 1, "the job was put back")
    caught = {(run.folder / f"caught-{node}").read_text() for node in nodes}
    assert caught == {"SIGUSR1"}
    run.until(run.requeued, "the job runs again")


def test_a_cancelled_job_ends_and_nobody_is_submitted(submit: Submit) -> None:
    """The launchers save what they have; no helper puts the job back, none fetches a spare."""
    run = submit("train-pool.sbatch")
    run.began()
    run.signal()
    assert run.outcome().startswith("CANCELLED")
    # On a busy machine Slurm may kill one before it has noted the signal: KillWait is 5 s.
    assert {path.read_text() for path in run.folder.glob("caught-*")} == {"SIGTERM"}
    assert not run.slurm.jobs()
    shown = run.cluster.controller.run("scontrol", "show", "jobs", "--oneliner").stdout
    assert max((int(number) for number in re.findall(r"JobId=(\d+)", shown)), default=run.id) == run.id
