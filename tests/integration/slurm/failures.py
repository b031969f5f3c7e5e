"""Jobs that end in the ways that accounting tells apart, on a cluster of n1, n2 and n3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import FAST, Cluster, runner_on, wait_until

SETTINGS: Mapping[str, str] = {**FAST, "RequeueExit": "9"}
NAMES = ("n1", "n2", "n3")
_FIRST = '#!/bin/sh\ntest "$SLURM_RESTART_COUNT" || {first}\n'
_HETEROGENEOUS = "#!/bin/sh\n#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=1\nexit 4\n"


class Failures:
    """Plays the jobs; all that fail do so in their first start, and go well in the next one, if they have one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._root = CommandSlurm(runner_on(cluster.controller))
        self._user = CommandSlurm(runner_on(cluster.controller, "nobody"))

    def run_too_long(self) -> None:
        """Begin a job that Slurm ends for its time limit, which it looks at every 30 s."""
        slow = self._submit("sleep 100", "--time=1")
        self._wait([slow], "running")
        self._cluster.controller.run("scontrol", "update", f"jobid={slow}", "endtime=now")

    def play(self) -> None:
        """Returns once every job has ended; n3 has no power then."""
        self._submit("true", "--job-name=a|b\nCOMPLETED|c", "--comment=7|FAILED\n|d", "--array=1-2")
        self._user.submit(_HETEROGENEOUS, ["--output=/dev/null", "--mem=100"])
        self._move()
        self._lose()
        self._wait_gone()

    def _move(self) -> None:
        """One that fails, one with an exit code of RequeueExit, and one that is requeued while it runs."""
        failed = self._submit("exit 1", "--nodelist=n1")
        again = self._root.submit(_FIRST.format(first="exit 9"), ["--nodelist=n3", *_OPTIONS])
        told = self._submit("sleep 100", "--nodelist=n3")
        gone = self._submit("sleep 100", "--nodelist=n3")
        self._wait_gone([failed])
        self._wait([told, gone], "running")
        self._root.cancel(gone)
        for job in (failed, told):
            self._root.requeue(job)
        self._restart([failed, again, told], "n2")

    def _lose(self) -> None:
        """A node without power takes a job's start with it, another job goes on with the rest."""
        lost = self._submit("sleep 100", "--nodelist=n[2-3]")
        smaller = self._submit("sleep 100", "--nodelist=n[2-3]", "--no-kill")
        self._wait([lost, smaller], "running")
        self._cluster.nodes["n3"].power_off()
        self._root.update_nodes(["n3"], "down", "no power")
        self._restart([lost], "n[1-2]")
        self._root.cancel(smaller)

    def _submit(self, first: str, *options: str) -> int:
        return self._user.submit(_FIRST.format(first=first), [*_OPTIONS, *options])

    def _restart(self, jobs: Sequence[int], nodes: str) -> None:
        self._wait(jobs, "pending")
        for job in jobs:
            self._cluster.controller.run("scontrol", "update", f"jobid={job}", f"nodelist={nodes}")
            self._root.set_start_time(job)
        self._wait_gone(jobs)

    def _wait(self, jobs: Sequence[int], state: str) -> None:
        wait_until(lambda: {job.state for job in self._root.jobs(jobs)} == {state}, f"jobs {jobs} are {state}")

    def _wait_gone(self, jobs: Sequence[int] = ()) -> None:
        wait_until(lambda: not self._root.jobs(jobs), f"jobs {jobs} have ended")


_OPTIONS = ("--output=/dev/null", "--mem=100", "--requeue")
