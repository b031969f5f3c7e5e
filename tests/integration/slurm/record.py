"""Records what the commands of the installed Slurm print, for tests/unit/test_slurm_commands.py.

For a new Slurm release run ``python -m tests.integration.slurm.record tests/fakes/slurm_recorded``. The scene is the
same: n1 and n2 run a job of an ordinary user, n3 was drained by a health check and n4 by opsd.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import SlurmError
from opsd.slurm.runner import Output, Runner
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until

SEPARATOR = "\x1fopsd\x1f"


class Recorder:
    """A runner that keeps every command with its output."""

    def __init__(self, run: Runner) -> None:
        self._run = run
        self.recorded: dict[str, Output] = {}

    def __call__(self, argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        output = self._run(argv, deadline_s, stdin)
        self.recorded[" ".join(argv)] = output
        return output


def record(cluster: Cluster) -> dict[str, Output]:
    """Set the scene on ``cluster`` and ask for everything."""
    node = cluster.nodes["n1"]
    root = CommandSlurm(runner_on(node))
    user = CommandSlurm(runner_on(node, "nobody"))
    root.update_nodes(["n3"], "drain", "NHC: check_fs /scratch")
    root.update_nodes(["n4"], "drain", 'opsd:42 gpu_xid: Xid 79 | State=IDLE, "see" /var/lib/opsd')
    job = user.submit("#!/bin/sh\nsleep 1000\n", ["--nodes=2", "--requeue", "--job-name=train\n99 x"])
    user.submit("#!/bin/sh\nsleep 1000\n", ["--begin=2040-01-01", "--partition=dev", "--time=60"])
    user.submit("#!/bin/sh\nsleep 1000\n", ["--array=1-2", "--begin=2040-01-01"])
    wait_until(lambda: root.jobs([job])[0].state == "running", "the job runs")
    root.reserve(
        "opsd_spares", {"StartTime": "now", "Duration": "60", "Users": "root", "Nodes": "n4", "Flags": "MAINT"}
    )
    return _ask(Recorder(runner_on(node)), Recorder(runner_on(node, "nobody")), job)


def _ask(root: Recorder, nobody: Recorder, job: int) -> dict[str, Output]:
    slurm = CommandSlurm(root, separator=lambda: SEPARATOR)
    user = CommandSlurm(nobody, separator=lambda: SEPARATOR)
    _ = slurm.version
    slurm.responds()
    slurm.configuration()
    slurm.nodes()
    slurm.nodes(["n3", "n4", "n9"])
    slurm.jobs()
    slurm.jobs([job, 999])
    slurm.jobs([999])
    slurm.jobs(node="n2")
    slurm.reservations()
    for refused in (
        lambda: user.update_nodes(["n1"], "drain", "opsd:1 refused"),
        lambda: slurm.requeue(999),
        lambda: slurm.update_nodes(["n9"], "resume"),
        lambda: slurm.submit("#!/bin/sh\n", ["--partition=nowhere"]),
    ):
        try:
            refused()
        except SlurmError:
            continue
        raise AssertionError("Slurm did what it should have refused")
    return {**root.recorded, **nobody.recorded}


def main() -> None:
    """Write one file named after the release into the folder given as argument."""
    with Cluster() as cluster:
        outputs = record(cluster)
        version = outputs["scontrol --version"].stdout.split()[-1]
    target = Path(sys.argv[1]) / f"{version}.json"
    target.write_text(json.dumps(outputs, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
