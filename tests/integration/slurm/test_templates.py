"""The sbatch templates on a real Slurm: one launcher a node, and the right end for whatever the launchers answer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import Job
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until

pytestmark = pytest.mark.xdist_group("slurm")

FOLDER = Path(__file__).parents[3] / "deploy/slurm"
TEMPLATES = sorted(FOLDER.glob("train-*.sbatch"), key=lambda path: path.name)
OPSD = """#!/bin/sh
# Stands for opsd: says how it was called, and ends with what the test writes down for its node.
echo "$SLURMD_NODENAME $*" >> calls
echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST $SLURM_RESTART_COUNT" > "job-$SLURMD_NODENAME"
[ "$1" = launch ] || exec scontrol requeue "$SLURM_JOB_ID"
until [ -e "answer-$SLURMD_NODENAME" ]; do sleep 0.05; done
exit "$(cat "answer-$SLURMD_NODENAME")"
"""


class Submitted:
    """A template as its user has adapted it, running on three nodes."""

    def __init__(self, cluster: Cluster, template: Path) -> None:
        self.folder = cluster.shared / template.stem
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        opsd = self.folder / "opsd"
        opsd.write_text(OPSD)
        opsd.chmod(0o755)
        self.slurm = CommandSlurm(runner_on(cluster.controller))
        self.id = self.slurm.submit(_adapted(template.read_text(), opsd, self.folder), [f"--chdir={self.folder}"])
        wait_until(lambda: len(self.calls()) == 3, "a launcher runs on each node")

    def calls(self) -> list[str]:
        """How opsd was called so far."""
        path = self.folder / "calls"
        return sorted(path.read_text().splitlines()) if path.exists() else []

    def answer(self, **codes: int) -> None:
        """Let the launchers of these nodes end."""
        for node, code in codes.items():
            (self.folder / f"answer-{node}").write_text(str(code))

    def steps(self, cluster: Cluster) -> int:
        """How many launchers run."""
        shown = cluster.controller.run("squeue", "--steps", "--noheader", f"--jobs={self.id}").stdout
        return len([line for line in shown.splitlines() if ".batch" not in line and ".extern" not in line])

    def job(self) -> Job | None:
        """The job while it waits or runs."""
        return next(iter(self.slurm.jobs([self.id])), None)

    def outcome(self, cluster: Cluster) -> str:
        """How the job has ended: its state and exit code."""
        wait_until(lambda: self.job() is None, "the job has ended")
        shown = cluster.controller.run("scontrol", "show", "job", str(self.id), "--oneliner").stdout
        values = dict(word.partition("=")[::2] for word in shown.split())
        return f"{values['JobState']} {values['ExitCode']}"


def _adapted(template: str, opsd: Path, folder: Path) -> str:
    lines = [line for line in template.splitlines() if not line.startswith("#SBATCH --gpus-per-node")]
    text = "\n".join(["#SBATCH --nodes=3" if line.startswith("#SBATCH --nodes") else line for line in lines]) + "\n"
    replaced = {
        "TRAINING=4 ": "TRAINING=2 ", "SHARED=/shared/runs": f"SHARED={folder}", "read -r -t 30": "read -r -t 1",
        "POOL=--partition=spares": "POOL=--partition=dev", "OPSD=${OPSD:-/opt/opsd/bin/opsd}": f"OPSD={opsd}",
    }  # fmt: skip
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text


@pytest.fixture
def submit(cluster: Cluster) -> Callable[[Path], Submitted]:
    """Start a template."""
    return lambda template: Submitted(cluster, template)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_is_sound(template: Path) -> None:
    """Bash can read it, and it asks for all that a run needs to outlive its nodes."""
    subprocess.run(["bash", "-n", template], check=True)
    text = template.read_text()
    asked = {line.split()[1].partition("=")[0] for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"--no-kill", "--requeue", "--signal", "--open-mode", "--nodes", "--output"} <= asked
    assert "srun --no-kill --wait=0 --kill-on-bad-exit=0" in text
    assert "--nodes=1 --ntasks=1 --nodelist=" in text


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_one_launcher_a_node_and_a_good_end(
    submit: Callable[[Path], Submitted], cluster: Cluster, template: Path
) -> None:
    """All get the same arguments; the first that calls the run done ends the job, whatever a dead one's step does."""
    run = submit(template)
    assert [call.split()[:3] for call in run.calls()] == [[f"n{i}", "launch", "--nnodes"] for i in (1, 2, 3)]
    assert len({call.partition(" ")[2] for call in run.calls()}) == 1
    assert f"--run-dir {run.folder}/train" in run.calls()[0]
    run.answer(n2=0)
    assert run.outcome(cluster) == "COMPLETED 0:0"


def test_saved_and_stopped_is_requeued(submit: Callable[[Path], Submitted], cluster: Cluster) -> None:
    """75 from more than half of the launchers puts the job back into the queue; one alone does not."""
    run = submit(FOLDER / "train-spares.sbatch")
    run.answer(n1=75)
    wait_until(lambda: run.steps(cluster) == 2, "one launcher has left")
    assert len(run.calls()) == 3
    run.answer(n3=75)
    wait_until(lambda: (job := run.job()) is not None and job.state == "pending", "the job is in the queue again")
    assert sum(" requeue" in call for call in run.calls()) == 1


def test_a_spare_is_fetched_for_a_lost_node(submit: Callable[[Path], Submitted], cluster: Cluster) -> None:
    """All nodes read of the loss and one asks; the launcher on the spare is given the run, its nodes and its job."""
    run = submit(FOLDER / "train-pool.sbatch")
    events = run.folder / "train/events.jsonl"
    events.parent.mkdir()
    events.write_text("")
    watch = ["pgrep", "--full", "tail -n 0"]
    wait_until(
        lambda: all(cluster.nodes[node].run(*watch, check=False).returncode == 0 for node in ("n1", "n2", "n3")),
        "all watch",
    )
    with events.open("a") as file:
        file.write('{"run": "train", "event": "node_lost", "lost": "n4", "ranks": false}\n')
        file.write('{"run": "train", "event": "node_lost", "lost": "n2", "ranks": true}\n')
    wait_until(lambda: len(run.calls()) == 4, "a spare has been fetched")
    assert [call.partition(" ")[0] for call in run.calls()] == ["n1", "n2", "n3", "n4"]
    first, spare = run.calls()[0], run.calls()[3]
    assert spare == first.replace("n1 launch", "n4 launch --nodes n[1-3],n4")
    assert (run.folder / "job-n4").read_text() == f"{run.id} n[1-3] 0\n"
    assert len(list(events.parent.glob(".spare-*"))) == 1
    run.answer(n1=0, n2=0, n3=0, n4=0)
    assert run.outcome(cluster) == "COMPLETED 0:0"


def test_a_failure_ends_the_job(submit: Callable[[Path], Submitted], cluster: Cluster) -> None:
    """It is not run again, and Slurm knows the launchers' exit code; it is no hold either."""
    run = submit(FOLDER / "train-requeue.sbatch")
    run.answer(n1=70, n2=70, n3=70)
    assert run.outcome(cluster) == "FAILED 70:0"


def test_signals_leave_time_to_save(submit: Callable[[Path], Submitted], cluster: Cluster) -> None:
    """The script itself outlives a SIGTERM, so that the launchers can save what they have."""
    run = submit(FOLDER / "train-spares.sbatch")
    for signal in ("TERM", "USR1"):
        cluster.controller.run("scancel", "--batch", f"--signal={signal}", str(run.id))
    assert run.steps(cluster) == 3
    run.answer(n1=0, n2=0, n3=0)
    assert run.outcome(cluster) == "COMPLETED 0:0"
