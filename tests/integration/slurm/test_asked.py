"""All ways to ask sbatch for GPUs, processors, memory and tasks: each launcher has what the job has on its node."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import pytest

from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, missing, runner_on, wait_until
from tests.integration.slurm.templates import USER

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow, pytest.mark.timeout(300)]

NODES = ("n1", "n2")
OPSD = """#!/bin/sh
export PYTHONPATH={path} HOME={folder}
[ "$1" = launch ] && shift && exec {python} -m tests.integration.slurm.stand_in "$@"
exec {python} -m opsd "$@"
"""
ASKED = (
    "",
    "--exclusive",
    "--exclusive --gpus-per-node=4 --mem=0",
    "--gres=gpu:2",
    "--gpus=4",
    "--gpus=3 --cpus-per-task=2 --mem-per-cpu=500",
    "--gpus-per-node=2 --ntasks-per-node=2",
    "--gpus-per-node=2 --cpus-per-gpu=3",
    "--gpus-per-node=2 --mem-per-gpu=1000",
    "--gpus-per-node=2 --gpu-bind=single:1 --ntasks-per-node=2",
    "--gpus-per-task=1 --ntasks-per-node=2",
    "--gpus-per-task=1 --ntasks=4 --cpus-per-task=2",
    "--gpus-per-socket=1 --sockets-per-node=1 --ntasks-per-node=1",
    "--gpus=4 --ntasks-per-gpu=1",
    "--ntasks-per-node=3 --cpus-per-task=2 --mem=4000",
    "--gpus=4 --ntasks=4 --gpu-bind=closest --gpu-freq=low",
    "--gpus-per-task=2 --gpu-bind=per_task:2 --ntasks-per-node=1",
    "--gpus-per-node=2 --ntasks-per-gpu=2",
    "--gpus-per-node=4 --cpus-per-gpu=2 --mem-per-gpu=500 --exclusive",
    "--gres=gpu:1 --gres-flags=enforce-binding --overcommit",
    "--gres=gpu:2 --ntasks=2 --ntasks-per-node=1 --ntasks-per-core=1",
    "--ntasks=8 --distribution=cyclic --hint=nomultithread",
    "--ntasks-per-node=2 --threads-per-core=1 --mem-bind=local --contiguous",
    "--mincpus=4 --mem-per-cpu=100 --spread-job",
)
_HAS = re.compile(r"^ +Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=", re.MULTILINE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with four GPUs each."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(NODES, gpus=4) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def none_left(cluster: Cluster) -> Iterator[None]:
    """A job that did not begin keeps no other from it."""
    yield
    cluster.restore()


def count(ids: str) -> int:
    """How many processors ``0-3,6`` are."""
    ends = (part.partition("-")[::2] for part in ids.split(","))
    return sum(int(last or first) - int(first) + 1 for first, last in ends)


@pytest.mark.parametrize("asked", ASKED)
def test_a_launcher_has_what_the_job_has_on_its_node(cluster: Cluster, asked: str) -> None:
    """Each GPU, each processor and all memory, whatever share of them was asked for a task, a socket or the job."""
    folder = cluster.shared / f"asked-{ASKED.index(asked)}"
    folder.mkdir()
    folder.chmod(0o777)
    opsd = folder / "opsd"
    opsd.write_text(OPSD.format(path=":".join(sys.path), folder=folder, python=sys.executable))
    opsd.chmod(0o755)
    slurm = CommandSlurm(runner_on(cluster.controller, USER))
    script = f"#!/bin/bash\nexec {opsd} slurm run --opsd {opsd} --run-dir {folder}/run -- train.py\n"
    options = ["--nodes=2", "--no-kill", f"--chdir={folder}", "--output=job.out", *asked.split()]
    job = slurm.submit(script, options)
    found = {node: folder / f"job-{node}" for node in NODES}

    def said() -> str:
        return (folder / "job.out").read_text() if (folder / "job.out").exists() else ""

    try:
        wait_until(
            lambda: all(path.exists() and path.read_text() for path in found.values()) or not slurm.jobs([job]),
            "all launchers run",
        )
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {slurm.jobs([job])}: {said()}") from error
    assert all(path.exists() for path in found.values()), said()
    has = {node: json.loads(path.read_text()) for node, path in found.items()}
    details = slurm.details(job).gres
    told = cluster.controller.run("scontrol", "--details", "show", "job", str(job)).stdout
    steps = cluster.controller.run("scontrol", "--oneliner", "show", "step", str(job)).stdout
    for node in NODES:
        gpus = details[node].get("gpu", 0)
        assert len(list(filter(None, has[node]["CUDA_VISIBLE_DEVICES"].split(",")))) == gpus
        ids, memory = next(rest for names, *rest in _HAS.findall(told) if node in names or "[" in names)
        step = next(line for line in steps.splitlines() if f" NodeList={node} " in line and ".batch" not in line)
        assert f"TRES=cpu={count(ids)},mem={memory}M," in step, step
    for node in NODES:
        (folder / f"answer-{node}").write_text(json.dumps({"exit": 0, "end": 0}))
    wait_until(lambda: not slurm.jobs([job]), "the job has ended")
    assert "the run is over (0)" in said()
