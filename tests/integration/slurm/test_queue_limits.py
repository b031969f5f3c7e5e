"""Jobs that Slurm does not let start, as an ordinary user: maintenance, and limits of QOS by a real accounting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm import accounting
from tests.integration.slurm.cluster import FAST, Cluster, missing, runner_on, wait_until
from tests.integration.slurm.templates import USER
from tests.integration.slurm.test_users import ended, folder_of, submit

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow, pytest.mark.timeout(180)]

WAITS = "[ -e again ] || { touch again; sleep 60; }"


@pytest.fixture(scope="module")
def limited() -> Iterator[Cluster]:
    """A cluster with two QOS: the user's own, and ``large``, which only jobs of two nodes may have."""
    if reason := missing() or accounting.missing():
        pytest.skip(reason)
    settings = {**FAST, "AccountingStorageEnforce": "associations,limits,qos"}
    with Cluster(("n1", "n2", "n3"), settings, dbd={}) as cluster:
        allowed = f"modify user {USER} set qos=normal,large"
        for words in ("add account lab", f"add user {USER} account=lab", "add qos large", allowed):
            cluster.controller.run("sacctmgr", "--immediate", *words.split())
        yield cluster


def restart(cluster: Cluster, folder_name: str, *options: str, nodes: int) -> str:
    """Have a run put back into the queue; what its job has said once it is done."""
    folder = folder_of(cluster, folder_name)
    job = submit(cluster, folder, *options, nodes=nodes, does=WAITS)
    wait_until((folder / "again").exists, "the run has begun")
    cluster.controller.run("scancel", "--signal=USR1", str(job))
    assert "JobState=COMPLETED" in (shown := ended(cluster, job, folder)) and "Restarts=1" in shown
    wait_until(lambda: not CommandSlurm(runner_on(cluster.controller)).jobs(), "nothing is left in the queue", 20)
    return (folder / f"job-{job}.out").read_text()


@pytest.mark.parametrize(
    ("partition", "limit"),
    [("AllowQos=large", "MinTRESPerJob=node=-1"), ("AllowQos=ALL", "MinTRESPerJob=node=2")],
)
def test_the_job_that_restarts_another_may_start(limited: Cluster, partition: str, limit: str) -> None:
    """Where only the job's own QOS is let in, and where that one needs more nodes; it used to wait for ever."""
    limited.controller.run("scontrol", "update", "partition=train", partition)
    default = "normal" if partition == "AllowQos=large" else "large"
    for words in (f"modify qos large set {limit}", f"modify user {USER} set defaultqos={default}"):
        limited.controller.run("sacctmgr", "--immediate", *words.split())
    name = f"qos-{default}"
    said = restart(limited, name, "--qos=large", nodes=2)
    if default == "normal":
        assert "without delay" in said, said
    else:
        assert "may start up to three minutes late: Slurm would not start the job that restarts it (QOSMinNode" in said


def test_a_restart_waits_for_the_end_of_a_maintenance(cluster: Cluster) -> None:
    """It says so, and leaves nothing in the queue once the job has started before its helper."""
    window = ("starttime=now", "duration=10", "flags=maint,ignore_jobs", "nodes=ALL", "users=root")
    folder = folder_of(cluster, "maintenance")
    slurm = CommandSlurm(runner_on(cluster.controller))
    job = submit(cluster, folder, nodes=4, does="[ ! -e again ] || exec sleep 60; touch again; sleep 60")
    wait_until((folder / "again").exists, "the run has begun")
    cluster.controller.run("scontrol", "create", "reservation", "reservationname=repairs", *window)
    cluster.controller.run("scancel", "--signal=USR1", str(job))
    wait_until(lambda: "Reserved" in slurm.jobs([job])[0].reason, "the maintenance holds it up", 60)
    assert len(slurm.jobs()) == 2
    slurm.unreserve("repairs")
    wait_until(lambda: [found.id for found in slurm.jobs() if found.state == "running"] == [job], "it runs again", 30)
    wait_until(lambda: [found.id for found in slurm.jobs()] == [job], "its helper is gone", 30)
    said = (folder / f"job-{job}.out").read_text()
    assert f"will restart job {job} once Slurm starts it (ReqNodeNotAvail" in said, said
