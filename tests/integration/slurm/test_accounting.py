"""What opsd makes of a real accounting: MariaDB, slurmdbd, and jobs that end in many ways."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from opsd import exitcodes
from opsd.slurm import job_faults
from opsd.slurm.port import SlurmDenied, SlurmUnavailable
from tests.integration.slurm import accounting, failures
from tests.integration.slurm.cluster import Cluster, missing, runner_on, wait_until

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def accounted() -> Iterator[Cluster]:
    """A cluster whose accounting shows ordinary users their own jobs only, after the jobs."""
    if reason := missing() or accounting.missing():
        pytest.skip(reason)
    with Cluster(failures.NAMES, failures.SETTINGS, dbd={"PrivateData": "jobs,users"}) as cluster:
        failures.Failures(cluster).play()
        run = runner_on(cluster.controller)
        wait_until(lambda: len(job_faults.read(run, days=1)) == 3, "slurmdbd knows of all that happened")
        yield cluster


def lemons(cluster: Cluster, user: str = "root") -> subprocess.CompletedProcess[str]:
    """``opsd nodes lemons --jobs --json`` as ``user``, which asks sacct for 91 days."""
    command = ("env", f"PYTHONPATH={':'.join(sys.path)}", sys.executable, "-m", "opsd", "nodes", "lemons")
    return cluster.nodes["n1"].run(*command, "--jobs", "--json", user=user, check=False, timeout=120)


def test_nodes_are_blamed_for_the_starts_that_failed_on_them(accounted: Cluster) -> None:
    """By an exit code on n1, by another and a loss of power on n3; not for what was cancelled or requeued."""
    faults = job_faults.read(runner_on(accounted.controller), days=1)
    assert sorted(fault.node for fault in faults) == ["n1", "n3", "n3"]
    told = json.loads(lemons(accounted).stdout)
    assert {one["node"]: one["faults"] for one in told["nodes"]} == {"n1": 1, "n3": 2}
    assert told["jobs_counted"] is True


def test_who_is_shown_no_jobs_of_others_counts_none(accounted: Cluster) -> None:
    """For sacct ends with 0 and says nothing of what it leaves out."""
    with pytest.raises(SlurmDenied, match="no job of another user"):
        job_faults.read(runner_on(accounted.controller, "nobody"), days=1, user="nobody")
    refused = lemons(accounted, "nobody")
    assert (refused.returncode, refused.stdout) == (exitcodes.FAILED, "")
    assert "opsd: Slurm: sacct shows nobody no job of another user" in refused.stderr


def test_an_accounting_that_is_away_is_no_history_without_failures(accounted: Cluster) -> None:
    """One sentence, and a failure; once it is back it answers."""
    run = runner_on(accounted.controller)
    accounted.accounting.stop_daemon()
    try:
        with pytest.raises(SlurmUnavailable, match="sacct: "):
            job_faults.read(run, days=1)
        away = lemons(accounted)
        assert (away.returncode, away.stdout, len(away.stderr.splitlines())) == (exitcodes.FAILED, "", 1)
    finally:
        accounted.accounting.start_daemon()
    wait_until(lambda: job_faults.read(run, days=1), "it answers with what it was told before")
