"""The Slurm port against a real Slurm."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from opsd.slurm.check import check, may_update_nodes
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.connect import WORKER, PyslurmSlurm, Worker, why_not_pyslurm
from opsd.slurm.drain import NotOurs, drain, give_back, take_down
from opsd.slurm.hostlist import compress, expand
from opsd.slurm.port import Slurm, SlurmDenied, SlurmRejected, SlurmUnavailable
from opsd.slurm.requeue import RESTART_GAP_S
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until

pytestmark = pytest.mark.xdist_group("slurm")

SLEEP = "#!/bin/sh\nexec sleep 1000\n"
DEADLINE_S = 2.0


@pytest.fixture(params=["commands", "bindings"])
def slurm(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Slurm]:
    """Each implementation of the port on node n1, as root."""
    run = runner_on(cluster.nodes["n1"])
    commands = CommandSlurm(run, deadline_s=DEADLINE_S)
    if request.param == "commands":
        yield commands
        return
    if find_spec("pyslurm") is None:
        pytest.skip("pyslurm is not installed")
    argv = cluster.nodes["n1"].command("env", f"PYTHONPATH={':'.join(sys.path)}", *WORKER)
    worker = Worker(argv, deadline_s=DEADLINE_S)
    if reason := why_not_pyslurm(worker, commands):
        pytest.skip(reason)
    yield PyslurmSlurm(worker, run, deadline_s=DEADLINE_S)
    worker.close()


@pytest.fixture
def user(cluster: Cluster) -> CommandSlurm:
    """The port on node n1 as an ordinary user."""
    return CommandSlurm(runner_on(cluster.nodes["n1"], "nobody"))


def state_of(slurm: Slurm, job: int) -> str:
    """The state of a job, "gone" if Slurm has forgotten it."""
    found = slurm.jobs([job])
    return found[0].state if found else "gone"


def wait_for(slurm: Slurm, job: int, state: str) -> None:
    """Wait until the job is in this state; if it does not come, job and nodes are told."""
    try:
        wait_until(lambda: state_of(slurm, job) == state, f"job {job} is {state}")
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {slurm.jobs()}; {slurm.nodes()}") from error


def test_every_node_is_seen(slurm: Slurm, cluster: Cluster) -> None:
    """The port sees the nodes of the cluster, idle and without reasons."""
    nodes = slurm.nodes()
    assert [node.name for node in nodes] == sorted(cluster.nodes)
    assert all(node.usable and not node.reason for node in nodes)
    assert slurm.responds()


def test_partitions_are_seen(slurm: Slurm, cluster: Cluster) -> None:
    """With what decides whose jobs give way; the test cluster is one on which evaluations do."""
    dev, train = sorted(slurm.partitions(), key=lambda partition: partition.name)
    assert (dev.name, dev.tier, dev.preempt_mode, dev.grace_s) == ("dev", 1, "REQUEUE", 0)
    assert (train.name, train.tier, train.nodes) == ("train", 10, tuple(sorted(cluster.nodes)))
    settings = {"PriorityTier", "PreemptType", "GraceTime"}
    assert not settings & {advice.setting for advice in check(slurm, "n1").advice}


def test_drains_with_a_reason_and_resumes(slurm: Slurm) -> None:
    """Slurm shows the reason and its author, and forgets both when the node is given back."""
    before = time.time()
    assert drain(slurm, ["n1", "n2"], "opsd:42 gpu_xid: Xid 79 | see /var/lib/opsd") == ("n1", "n2")
    n1 = slurm.nodes(["n1"])[0]
    assert n1.reason == "opsd:42 gpu_xid: Xid 79 | see /var/lib/opsd"
    assert n1.reason_by == "root"
    assert n1.reason_at is not None
    assert n1.reason_at >= before - 1
    assert give_back(slurm, ["n1", "n2", "n3"]) == ("n1", "n2")
    wait_until(lambda: all(node.usable for node in slurm.nodes()), "nodes usable again")


def test_a_foreign_reason_is_left_alone(slurm: Slurm) -> None:
    """What a person or a health check has drained stays as it is."""
    slurm.update_nodes(["n3"], "drain", "NHC: check_fs")
    for attempt in (lambda: drain(slurm, ["n3"], "opsd:1 x"), lambda: give_back(slurm, ["n3"])):
        with pytest.raises(NotOurs, match="NHC: check_fs"):
            attempt()
    assert slurm.nodes(["n3"])[0].reason == "NHC: check_fs"


def test_a_node_taken_down_ends_its_jobs_and_comes_back(slurm: Slurm) -> None:
    """take_down requeues the node's job at once, and the node can be given back."""
    job = slurm.submit(SLEEP, ["--nodelist=n2", "--requeue"])
    wait_for(slurm, job, "running")
    take_down(slurm, "n2", "opsd:43 node_lost")
    assert slurm.nodes(["n2"])[0].state == "down"
    wait_for(slurm, job, "pending")
    assert give_back(slurm, ["n2"]) == ("n2",)
    wait_until(lambda: slurm.nodes(["n2"])[0].usable, "the node is usable again")


def test_a_requeued_job_starts_at_once_with_a_start_time(slurm: Slurm) -> None:
    """Requeue, wait until it is pending, start now: far sooner than Slurm would."""
    job = slurm.submit(SLEEP, ["--nodes=2", "--requeue", "--job-name=a\nb"])
    wait_for(slurm, job, "running")
    (running,) = slurm.jobs([job])
    assert len(running.nodes) == 2
    assert running.batch_host in running.nodes
    assert running.name == "a\nb"
    assert running in slurm.jobs(node=running.nodes[0])
    slurm.requeue(job)
    wait_for(slurm, job, "pending")
    time.sleep(RESTART_GAP_S)
    slurm.set_start_time(job)
    wait_for(slurm, job, "running")
    assert slurm.jobs([job])[0].restarts == 1
    slurm.cancel(job)
    slurm.cancel(job)
    wait_until(lambda: state_of(slurm, job) in ("cancelled", "gone"), "the job is cancelled")


def test_a_start_time_in_the_future_is_kept(slurm: Slurm) -> None:
    """A job can be put off to a given second."""
    job = slurm.submit(SLEEP, ["--begin=now+1hour"])
    later = float(int(time.time()) + 7200)
    slurm.set_start_time(job, later)
    assert slurm.jobs([job])[0].starts_at == later


def test_reserves_a_pool_of_spares(slurm: Slurm) -> None:
    """A REPLACE_DOWN reservation is made, seen and deleted."""
    pool = {"StartTime": "now", "Duration": "infinite", "Users": "root", "NodeCnt": "1", "Flags": "REPLACE_DOWN"}
    slurm.reserve("opsd_spares", {**pool, "PartitionName": "train"})
    (spares,) = slurm.reservations()
    assert (spares.name, spares.node_count, spares.users) == ("opsd_spares", 1, ("root",))
    assert "REPLACE_DOWN" in spares.flags
    slurm.unreserve("opsd_spares")
    assert list(slurm.reservations()) == []
    with pytest.raises(SlurmRejected):
        slurm.unreserve("opsd_spares")


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda user, job: drain(user, ["n1"], "opsd:1 x"),
        lambda user, job: user.requeue(job),
        lambda user, job: user.set_start_time(job),
        lambda user, job: user.cancel(job),
        lambda user, job: user.reserve("x", {"StartTime": "now", "Duration": "1", "Users": "root", "Nodes": "n1"}),
    ],
)
def test_an_ordinary_user_is_denied(
    cluster: Cluster, user: CommandSlurm, forbidden: Callable[[CommandSlurm, int], object]
) -> None:
    """Nodes, reservations and the jobs of others are not an ordinary user's."""
    others = CommandSlurm(runner_on(cluster.nodes["n1"])).submit(SLEEP, ["--begin=now+1hour"])
    with pytest.raises(SlurmDenied):
        forbidden(user, others)


def test_an_ordinary_user_may_requeue_the_own_job(user: CommandSlurm) -> None:
    """The cold path needs no rights beyond those of the job's owner."""
    job = user.submit(SLEEP, ["--requeue"])
    wait_for(user, job, "running")
    user.requeue(job)
    wait_for(user, job, "pending")
    time.sleep(RESTART_GAP_S)
    user.set_start_time(job)
    wait_for(user, job, "running")


def test_the_last_task_of_an_array_is_changed_alone(cluster: Cluster, user: CommandSlurm) -> None:
    """Slurm gives it the number of the array, by which its own commands take all tasks."""
    last = user.submit(SLEEP, ["--array=1-3", "--requeue", "--cpus-per-task=1", "--mem=100"])

    def states() -> dict[int, str]:
        return {job.id - last: job.state for job in user.jobs()}

    wait_until(lambda: states() == dict.fromkeys(range(3), "running"), "all tasks run")
    assert [job.id for job in user.jobs([last])] == [last]
    user.summarize(last, "a note")
    comments = cluster.controller.run("squeue", "--noheader", "--format=%i %k").stdout.splitlines()
    assert sorted(comments) == [f"{last}_1 (null)", f"{last}_2 (null)", f"{last}_3 [opsd run: a note]"]
    user.requeue(last)
    wait_until(lambda: states() == {0: "pending", 1: "running", 2: "running"}, "one task waits")
    time.sleep(RESTART_GAP_S)
    user.set_start_time(last)
    wait_for(user, last, "running")
    user.cancel(last)
    wait_until(lambda: states() == {1: "running", 2: "running"}, "two tasks run on")


def test_the_permission_probe_tells_root_from_others(slurm: Slurm, user: CommandSlurm) -> None:
    """Found out without touching any node."""
    assert may_update_nodes(slurm)
    assert not may_update_nodes(user)
    assert all(node.usable for node in slurm.nodes())


@pytest.mark.slow
def test_a_dead_controller_is_an_answer_within_the_deadline(slurm: Slurm, cluster: Cluster) -> None:
    """Neither a killed nor a frozen slurmctld holds anybody up, and both come back."""
    before = [node.name for node in slurm.nodes()]
    cluster.stop_controller()
    try:
        _is_unavailable(slurm)
    finally:
        cluster.start_controller()
    wait_until(slurm.responds, "the controller is back")
    cluster.freeze_controller()
    try:
        _is_unavailable(slurm)
    finally:
        cluster.thaw_controller()
    wait_until(slurm.responds, "the controller is thawed")
    assert [node.name for node in slurm.nodes()] == before


def _is_unavailable(slurm: Slurm) -> None:
    for call in (slurm.nodes, slurm.jobs, slurm.reservations):
        began = time.monotonic()
        with pytest.raises(SlurmUnavailable):
            call()
        assert time.monotonic() - began < DEADLINE_S + 10
    assert not slurm.responds()


def test_hostlists_agree_with_slurm(cluster: Cluster) -> None:
    """Our expansion and Slurm's are the same, order and padding included; what we compress Slurm reads back."""
    for hostlist in ("n[1-3,7],login", "n[008-011]", "r[1-2]n[01-02]", "a,b[3,1]"):
        printed = cluster.controller.run("scontrol", "show", "hostnames", hostlist).stdout.split()
        assert list(expand(hostlist)) == printed
    names = [f"gpu{number}" for number in (1, 2, 3, 10, 99, 100)] + ["n09", "n10", "n11", "login"]
    printed = cluster.controller.run("scontrol", "show", "hostnames", compress(names)).stdout.split()
    assert sorted(printed) == sorted(names)


def test_check_on_a_node_of_the_cluster(cluster: Cluster) -> None:
    """The command names the release, the node and the rights, and has no advice for the tuned settings but for one."""
    done = cluster.nodes["n1"].run(sys.executable, "-m", "opsd", "slurm", "check")
    assert "node n1 is idle" in done.stdout
    assert "may drain, resume and down nodes" in done.stdout
    assert done.stdout.partition("make recovery slow:")[2].count("(now ") == 1  # a cluster of its own has TCPTimeout=1
