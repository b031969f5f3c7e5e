"""Several runs of several nodes in one job, at the same time, as an ordinary user who has said nothing of ports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsd.launch.run.launchers import default_port
from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until
from tests.integration.slurm.templates import USER

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow]

PROGRAM = """
import os, pathlib, sys, time
own, other = sys.argv[1:]
rank = os.environ["RANK"]
pathlib.Path(f"here-{own}-{rank}").write_text(os.environ["OPSD_RUN"])
limit = time.monotonic() + 40
while not all(pathlib.Path(f"here-{other}-{rank}").exists() for rank in "01"):
    assert time.monotonic() < limit, "the other run is not there"
    time.sleep(0.05)
pathlib.Path(f"done-{own}-{rank}").touch()
"""
LINES = {
    "slurm run": (2, "$OPSD slurm run --run-id {own} -- prog.py {own} {other}"),
    "steps with a node in common": (
        3,
        "srun --overlap -w {nodes} -N2 -n2 $OPSD launch --nnodes 2 prog.py {own} {other}",
    ),
    "steps without": (4, "srun -w {nodes} -N2 -n2 $OPSD launch --nnodes 2 prog.py {own} {other}"),
    "steps of one job, named": (
        2,
        "srun --overlap -N2 -n2 $OPSD launch --run-id {own} --nnodes 2 prog.py {own} {other}",
    ),
}


@pytest.fixture
def folder(cluster: Cluster) -> Path:
    """Where the job runs."""
    folder = cluster.shared / f"beside-{len(list(cluster.shared.iterdir()))}"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "prog.py").write_text(PROGRAM)
    return folder


def run_both(cluster: Cluster, folder: Path, nodes: int, first: str, second: str) -> str:
    """What a job said that has run both commands; ``both`` is there if both have ended well."""
    script = (
        f"#!/bin/bash\nexport HOME={folder} PYTHONPATH={':'.join(sys.path)} OPSD='{sys.executable} -m opsd'\n"
        f"{first} & one=$!\n{second} & two=$!\nwait $one && wait $two && touch both\n"
    )
    slurm = CommandSlurm(runner_on(cluster.controller, USER))
    options = [f"--chdir={folder}", "--output=job.out", f"--nodelist=n[1-{nodes}]", f"--nodes={nodes}", "--no-kill"]
    job = slurm.submit(script, options)
    wait_until(lambda: not slurm.jobs([job]), "the job has ended")
    return (folder / "job.out").read_text()


@pytest.mark.parametrize("kind", LINES)
def test_two_runs_of_one_job(cluster: Cluster, folder: Path, kind: str) -> None:
    """Each rank sees those of the other run, and both runs end well."""
    nodes, line = LINES[kind]
    first = line.format(own="a", other="b", nodes="n1,n2")
    second = line.format(own="b", other="a", nodes="n3,n4" if nodes == 4 else "n2,n3")
    said = run_both(cluster, folder, nodes, first, second)
    assert (folder / "both").exists(), said
    runs = [{(folder / f"here-{own}-{rank}").read_text() for rank in "01"} for own in "ab"]
    assert [len(run) for run in runs] == [1, 1]
    assert runs[0] != runs[1]
    assert len(list(folder.glob("done-*"))) == 4


def test_a_job_that_exports_nothing_ends_as_its_run(cluster: Cluster, folder: Path) -> None:
    """The steps of such a job have no environment by default; the launchers and ranks have that of the batch script.

    It is root's: Slurm takes the environment of a login shell, and 25.11 holds the job of a user who has none.
    """
    slurm = CommandSlurm(runner_on(cluster.controller))
    program = "import os, pathlib; pathlib.Path('seen-' + os.environ['RANK']).write_text(os.environ['LOADED'])"
    script = (
        f"#!/bin/bash\nexport HOME={folder} PATH={os.environ['PATH']} PYTHONPATH={':'.join(sys.path)}\n"
        "export LOADED='a module'\n"
        f'exec {sys.executable} -m opsd slurm run --run-id r --no-python -- {sys.executable} -c "{program}"\n'
    )
    options = ["--export=NONE", "--requeue", "--no-kill", "--nodes=2", f"--chdir={folder}", "--output=job.out"]
    job = slurm.submit(script, options)
    wait_until(lambda: not slurm.jobs([job]), "the job has ended")
    said = (folder / "job.out").read_text()
    assert "the run is over (0): all ranks finished" in said and "requeueing" not in said, said
    assert [path.read_text() for path in folder.glob("seen-*")] == ["a module"] * 2


def test_two_runs_with_one_name_never_mix(cluster: Cluster, folder: Path) -> None:
    """Steps of all nodes, each of which could be a later attempt at the job's run: the sentence says what to do."""
    line = "srun --overlap -N2 -n2 $OPSD launch --join-timeout 8 --nnodes 2 --no-python sh -c"
    first, second = (f"{line} 'touch here-{own}-$RANK; sleep 2'" for own in "ab")
    said = run_both(cluster, folder, 2, first, second)
    assert "run job-" in said and "give this one another name with --run-id" in said
    assert [len(list(folder.glob(f"here-{own}-*"))) % 2 for own in "ab"] == [0, 0], said


LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))):
    print("listening", flush=True)
    sys.stdin.read()
"""


def test_a_node_on_which_a_stranger_has_the_port_is_avoided(cluster: Cluster, folder: Path) -> None:
    """Its launcher says what to do; the others do not wait for it, and the job starts again on other nodes."""
    slurm = CommandSlurm(runner_on(cluster.controller, USER))
    script = (
        f"#!/bin/bash\nexport HOME={folder} PYTHONPATH={':'.join(sys.path)}\n"
        f"exec {sys.executable} -m opsd slurm run --run-id r --no-python -- touch done\n"
    )
    options = ["--requeue", "--open-mode=append", "--no-kill", f"--chdir={folder}", "--output=job.out"]
    job = slurm.submit(script, ["--hold", "--nodes=2", "--exclusive", "--exclude=n4", *options])
    port = default_port("r", {"SLURM_JOB_ID": str(job)})
    command = cluster.nodes["n2"].command(sys.executable, "-c", LISTEN, "10.77.0.3", str(port))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline() == b"listening\n"
        slurm.release(job)
        wait_until(lambda: not slurm.jobs([job]), "the job has ended")
        stranger.communicate()
    said = (folder / "job.out").read_text()
    assert f"cannot listen at 10.77.0.3:{port}: another program does; give all launchers of the run the same" in said
    assert "the launcher of n2 ended with 1; 2 are needed and 1 are there" in said
    assert (folder / "done").exists(), said
