"""Records what the commands of the installed Slurm print, for tests/unit/test_slurm_commands.py.

For a new Slurm release run ``python -m tests.integration.slurm.record tests/fakes/slurm_recorded``. The scene is the
same: n1 and n2 run a job of an ordinary user, n3 was drained by a health check and n4 by opsd. The accounting is that
of a cluster of its own, after the jobs of ``failures``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from opsd.slurm import gres_devices, job_faults, topology_source
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import SlurmError
from opsd.slurm.runner import Output, Runner
from tests.integration.slurm import failures
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until

SEPARATOR = "\x1fopsd\x1f"
JOB = "#!/bin/sh\nsrun --nodes=1 --ntasks=1 --nodelist=n2 --overlap sleep 1000 &\nexec sleep 1000\n"
TREE = "SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\nSwitchName=s Switches=a,b\n"
EXCLUDED_AT = 1_763_711_000.0
ASKED_AT = 1_692_273_600.0


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
    root.set_comment("n4", 'rack 12, "opsd1" | Comment=x')
    gpus = "--gres=gpu:2"
    job = user.submit(JOB, ["--nodes=2", "--requeue", "--job-name=train\n99 x", "--comment=tuning | run\n12", gpus])
    later = user.submit("#!/bin/sh\nsleep 1000\n", ["--begin=2040-01-01", "--partition=dev", "--time=60"])
    user.submit("#!/bin/sh\nsleep 1000\n", ["--array=1-2", "--begin=2040-01-01"])
    user.exclude(later, ["n3"], EXCLUDED_AT)
    user.summarize(job, "started")
    root.summarize(job, "12 steps")
    wait_until(lambda: root.jobs([job])[0].state == "running" and root.steps(job), "the job runs")
    root.reserve(
        "opsd_spares", {"StartTime": "now", "Duration": "60", "Users": "root", "Nodes": "n4", "Flags": "MAINT"}
    )
    return _ask(Recorder(runner_on(node)), Recorder(runner_on(node, "nobody")), job, later)


def _ask(root: Recorder, nobody: Recorder, job: int, later: int) -> dict[str, Output]:
    slurm = CommandSlurm(root, separator=lambda: SEPARATOR)
    user = CommandSlurm(nobody, separator=lambda: SEPARATOR)
    _ = slurm.version
    slurm.responds()
    slurm.configuration()
    slurm.nodes()
    slurm.nodes(["n3", "n4", "n9"])
    slurm.comments()
    slurm.partitions()
    slurm.jobs()
    slurm.jobs([job, 999])
    slurm.jobs([999])
    slurm.jobs(node="n2")
    slurm.steps(job)
    slurm.given(job, "n1")
    slurm.excluded(job)
    slurm.excluded(later)
    slurm.reservations()
    gres_devices.read("n1", root)
    root(("scontrol", "show", "topology"), topology_source.DEADLINE_S)
    _ask_in_vain(slurm, user)
    return {**root.recorded, **nobody.recorded}


def _ask_in_vain(slurm: CommandSlurm, user: CommandSlurm) -> None:
    for ask in (lambda: slurm.cancel(999), lambda: slurm.steps(999)):
        with suppress(SlurmError):  # some releases end with 0
            ask()
    for refused in (
        lambda: user.update_nodes(["n1"], "drain", "opsd:1 refused"),
        lambda: user.set_comment("n1", "refused"),
        lambda: slurm.requeue(999),
        lambda: slurm.given(999, "n1"),
        lambda: slurm.update_nodes(["n9"], "resume"),
        lambda: slurm.submit("#!/bin/sh\n", ["--partition=nowhere"]),
        lambda: slurm.unreserve("nothing"),
    ):
        try:
            refused()
        except SlurmError:
            continue
        raise AssertionError("Slurm did what it should have refused")


def _accounting() -> dict[str, Output]:
    """What sacct prints, asked as of ``ASKED_AT``: all jobs are from after that."""
    with Cluster(failures.NAMES, failures.SETTINGS, dbd={}) as cluster:
        played = failures.Failures(cluster)
        played.run_too_long()
        played.play()
        recorder = Recorder(runner_on(cluster.controller))
        job_faults.read(recorder, ASKED_AT, days=0)
    return recorder.recorded


def main() -> None:
    """Write one file named after the release into the folder given as argument."""
    with Cluster(gpus=2, topology=TREE) as cluster:
        outputs = record(cluster)
        version = outputs["scontrol --version"].stdout.split()[-1]
    outputs |= _accounting()
    text = json.dumps(outputs, indent=1, sort_keys=True).replace(str(cluster.folder), "/cluster")
    (Path(sys.argv[1]) / f"{version}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
