"""Pipelines on a real Slurm: in every stage a full disk, a killed task, a preemption and a lost node change no byte."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from opsd.data.array import Arrays, arrays_of
from opsd.data.pipeline import Stage
from opsd.data.records import StageFolder
from opsd.data.run import Tries
from opsd.data.status import status
from opsd.slurm.commands import CommandSlurm
from tests.fakes.clock import until
from tests.fakes.pipelines import contents, make_raw
from tests.integration.slurm.cluster import FAST, Cluster, missing, runner_on, wait_until

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.long, pytest.mark.timeout(1200)]

OPSD = (sys.executable, "-m", "opsd", "data")
PIPELINE = """
import os, signal, socket
from pathlib import Path
from types import SimpleNamespace
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

ROOT = "FOLDER"

class Trouble:
    def __init__(self, stage):
        self.stage = stage

    def __call__(self, documents, rank=0, world_size=1):
        yield next(documents)
        once = Path(ROOT, f"trouble-{self.stage}-{rank}")
        if rank < 4 and not Path(ROOT, "calm").exists() and not once.exists():
            once.write_text(socket.gethostname())
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1:
                with open("/mnt/scratch", "wb", buffering=0) as file:
                    while True:
                        file.write(b"x" * 65536)
            while True:
                signal.pause()
        yield from documents

def made(stage, source, target):
    steps = [JsonlReader(f"{ROOT}/{source}"), Trouble(stage), LambdaFilter(lambda document: len(document.text) % 7)]
    return LocalPipelineExecutor([*steps, JsonlWriter(f"{ROOT}/{target}", "${rank}.jsonl.gz")], tasks=6)

stages = [made(1, "raw", "one"), made(2, "one", "two"), made(3, "two", "three")]
"""


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A cluster of its own, with small arrays."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(["n1", "n2", "n3", "n4"], {**FAST, "MaxArraySize": "5"}) as cluster:
        yield cluster


def marked(folder: Path, stage: int, rank: int) -> str:
    """The node on which the task of a stage waits for its fate."""
    mark = folder / f"trouble-{stage}-{rank}"
    wait_until(lambda: mark.exists() and mark.read_text(), f"task {rank} of stage {stage}", 240)
    return mark.read_text()


def test_four_troubles_in_every_stage_change_no_byte(own_cluster: Cluster) -> None:
    """The outputs are those of a run that nothing has happened to, and so are the counts."""
    cluster, folder = own_cluster, own_cluster.shared
    make_raw(folder / "raw", files=12, documents=60)
    file = folder / "pipeline.py"
    file.write_text(PIPELINE.replace("FOLDER", str(folder)))
    words = (*OPSD, "run", str(file), "--partition", "dev", "--sbatch=--exclusive", "--retries", "2")

    with cluster.controller.process(*words) as command:
        for stage in (1, 2, 3):
            preempted, lost = marked(folder, stage, 2), marked(folder, stage, 3)
            cluster.controller.run(
                "sbatch", "--partition=train", "--exclusive", f"--nodelist={preempted}", "--wrap=sleep 2"
            )
            cluster.nodes[lost].power_off()
            done = StageFolder(file.with_suffix(""), stage).folder / "done.json"
            wait_until(done.exists, f"stage {stage}", 300)
            cluster.nodes[lost].power_on()
            cluster.start_node(cluster.nodes[lost])
        assert command.wait(120) == 0
    found = status(file.with_suffix(""))
    assert [stage["state"] for stage in found["stages"]] == ["done"] * 3
    assert all((stage["failed"], stage["lost"]) == (2, 2) for stage in found["stages"])
    whys = {attempt.why for attempt in StageFolder(file.with_suffix(""), 1).attempts() if attempt.outcome == "failed"}
    killed = "its process ended with signal SIGKILL"
    assert killed in whys and all("No space left on device" in why for why in whys - {killed})
    disturbed = {name: contents(folder / name) for name in ("one", "two", "three")}

    for name in ("one", "two", "three", "pipeline"):
        shutil.rmtree(folder / name)
    (folder / "calm").touch()
    cluster.controller.run(*words, "--local", timeout=240)
    assert {name: contents(folder / name) for name in ("one", "two", "three")} == disturbed
    calm = status(file.with_suffix(""))
    assert [stage["flows"] for stage in calm["stages"]] == [stage["flows"] for stage in found["stages"]]


def test_more_tasks_than_an_array_takes(own_cluster: Cluster) -> None:
    """A command that is killed finds its arrays again; no task runs twice."""
    cluster, folder = own_cluster, own_cluster.shared
    make_raw(folder / "raw", files=23, documents=4)
    (folder / "calm").touch()
    file = folder / "pipeline.py"
    file.write_text(PIPELINE.replace("FOLDER", str(folder)).replace("tasks=6", "tasks=23"))
    slurm, words = CommandSlurm(runner_on(cluster.controller)), (*OPSD, "run", str(file), "--tasks-per-job", "2")
    with cluster.controller.process(*words):
        until(lambda: any(job.name.startswith("opsd-data-") for job in slurm.jobs()))
    cluster.controller.run(*words, timeout=400)
    told = cluster.controller.run(*OPSD, "status", str(file), "--json", "-").stdout
    assert [(stage["done"], stage["failed"], stage["lost"]) for stage in json.loads(told)["stages"]] == [(23, 0, 0)] * 3
    first = StageFolder(file.with_suffix(""), 1)
    assert len(first.attempts()) == 23
    assert len(list((first.folder / "arrays").glob("*.json"))) == 3


TASK = """#!/bin/sh
rank=$(sed 's/^\\[\\[//; s/\\].*//' "$3/stage-01/arrays/$5.json" | cut -d, -f$((SLURM_ARRAY_TASK_ID + 1)))
echo x >> "$3/ran-$((rank))"
echo '{}' > "$3/stage-01/tasks/$(printf %05d $((rank))).json"
"""


def test_three_thousand_tasks_with_the_usual_size_of_arrays() -> None:
    """Slurm takes three arrays, and each task runs once; a shell script stands for the task, to save an hour."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(["n1", "n2", "n3", "n4"], {**FAST, "MaxArraySize": "1001"}) as cluster:
        script = cluster.shared / "task.sh"
        script.write_text(TASK)
        script.chmod(0o755)
        root, slurm = cluster.shared / "state", CommandSlurm(runner_on(cluster.controller))
        folder = StageFolder(root, 1)
        folder.make()
        arrays = Arrays(root, slurm, print, opsd=(str(script),))
        stage = Stage(1, SimpleNamespace(world_size=3000, pipeline=[]))
        tries = Tries()
        arrays.run(stage, folder, range(3000), tries)
        assert not tries.tried
        assert folder.finished() == set(range(3000))
        assert sorted(array.jobs for array in arrays_of(folder)) == [998, 1001, 1001]
        assert {path.read_text() for path in root.glob("ran-*")} == {"x\n"}
