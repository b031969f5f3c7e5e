"""Requeues on a real Slurm with its default settings: the job runs again elsewhere, soon, and once."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.port import Job, SlurmDenied, SlurmRejected
from opsd.slurm.requeue import ExcludedNodes, Requeued, requeue_now
from tests.integration.slurm.cluster import FAST, Cluster, missing, runner_on, wait_until

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.slow]

OPSD = f"env PYTHONPATH={':'.join(sys.path)} {sys.executable} -m opsd"
TRAINING = f"""#!/bin/bash
# A launcher on each node; the one that is told of a loss asks for the requeue from within the job.
echo "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | xargs)" >> starts
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    srun --no-kill -W0 -K0 -N1 -n1 -w "$node" bash -c '
        touch "here-$SLURMD_NODENAME"
        until [ -e "tell-$SLURMD_NODENAME" ]; do sleep 0.05; done
        lost=$(cat "tell-$SLURMD_NODENAME") && rm "tell-$SLURMD_NODENAME"
        {OPSD} requeue --lost "$lost" > "said-$SLURMD_NODENAME" 2>&1
        [ -e leave ] || exec sleep 1000' &
done
wait
"""


@pytest.fixture
def defaults() -> Iterator[Cluster]:
    """A cluster without any of the settings that opsd recommends."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(settings={}) as cluster:
        yield cluster


def starts(cluster: Cluster) -> list[list[str]]:
    """The nodes of each start of the job."""
    path = cluster.shared / "starts"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def begin(cluster: Cluster, slurm: CommandSlurm, *options: str) -> Job:
    """A job of two launchers, both of which run."""
    for left in [cluster.shared / "starts", *cluster.shared.glob("here-*")]:
        left.unlink(missing_ok=True)
    job = slurm.submit(TRAINING, ["-N2", "--mem=100M", "--requeue", "--no-kill", f"--chdir={cluster.shared}", *options])
    wait_until(lambda: starts(cluster), "the job runs")
    begun = slurm.jobs([job])[0]
    wait_until(lambda: all((cluster.shared / f"here-{name}").exists() for name in begun.nodes), "its launchers run")
    return begun


def resumed(cluster: Cluster, slurm: CommandSlurm, job: int) -> bool:
    """True once the job runs for the second time."""
    return len(starts(cluster)) == 2 and slurm.jobs([job])[0].restarts == 1


def test_an_ordinary_user_need_not_wait_for_slurm(defaults: Cluster) -> None:
    """Without any rights on nodes the job is off the dead node, which Slurm still takes for a good one, in seconds."""
    user = CommandSlurm(runner_on(defaults.nodes["n4"], "nobody"))
    job = begin(defaults, user, "--exclude=n4")
    [victim] = set(job.nodes) - {job.batch_host}
    defaults.nodes[victim].power_off()
    lost = time.monotonic()
    requeued = requeue_now(user, job.id, ExcludedNodes(lost=(victim,)))
    assert (requeued.restarts, requeued.avoided) == (1, (victim,))
    assert user.excluded(job.id).keys() == {victim}
    wait_until(lambda: resumed(defaults, user, job.id), "the job runs again")
    print(f"\nordinary user: running again {time.monotonic() - lost:.1f} s after the loss")
    assert starts(defaults)[1] == sorted({"n1", "n2", "n3"} - {victim})


def test_a_survivor_has_its_own_job_started_elsewhere(defaults: Cluster) -> None:
    """The launcher that asks for it ends with the job; another process sees it through. Slurm takes nine minutes."""
    slurm = CommandSlurm(runner_on(defaults.nodes["n4"]))
    job = begin(defaults, slurm, "--exclude=n4")
    [victim] = set(job.nodes) - {job.batch_host}
    defaults.nodes[victim].power_off()
    lost = time.monotonic()
    (defaults.shared / f"tell-{job.batch_host}").write_text(victim)
    wait_until(lambda: resumed(defaults, slurm, job.id), "the job runs again")
    print(f"\nfrom inside: running again {time.monotonic() - lost:.1f} s after the loss")
    assert victim not in starts(defaults)[1]
    [node] = slurm.nodes([victim])
    assert (node.state, node.reason) == ("down", "opsd:requeue node_lost")
    wait_until(lambda: [found.id for found in slurm.jobs() if found.state == "running"] == [job.id], "nobody else runs")
    assert slurm.jobs([job.id])[0].restarts == 1


def test_a_job_with_a_range_of_nodes_starts_on_all_that_are_left(defaults: Cluster) -> None:
    """The job that attends to its requeue has one of them, and frees it before; whoever looks again waits its turn."""
    user = CommandSlurm(runner_on(defaults.controller, "nobody"))
    job = begin(defaults, user, "--nodes=2-4", "--exclusive")
    victim = next(name for name in job.nodes if name != job.batch_host)
    defaults.nodes[victim].power_off()
    lost = time.monotonic()
    (defaults.shared / f"tell-{job.batch_host}").write_text(victim)
    wait_until(lambda: resumed(defaults, user, job.id), "the job runs again")
    print(f"\nrange of nodes: running again {time.monotonic() - lost:.1f} s after the loss")
    assert starts(defaults)[1] == sorted(set(job.nodes) - {victim})
    assert [found.id for found in user.jobs() if found.state != "pending"] == [job.id]


@pytest.mark.long
def test_the_batch_host_dies(cluster_of_tuned_timeouts: Cluster) -> None:
    """With the node of the batch script gone the launcher leaves all to the job that attends to it, and ends."""
    cluster = cluster_of_tuned_timeouts
    slurm = CommandSlurm(runner_on(cluster.nodes["n4"]))
    job = begin(cluster, slurm, "--exclude=n4")
    [survivor] = set(job.nodes) - {job.batch_host}
    (cluster.shared / "leave").touch()
    cluster.nodes[job.batch_host].power_off()
    lost = time.monotonic()
    (cluster.shared / f"tell-{survivor}").write_text(job.batch_host)
    wait_until(lambda: resumed(cluster, slurm, job.id), "the job runs again")
    print(f"\nbatch host: running again {time.monotonic() - lost:.1f} s after the loss")
    assert job.batch_host not in starts(cluster)[1]
    assert "is being stopped and will start again at once" in (cluster.shared / f"said-{survivor}").read_text()


@pytest.fixture
def cluster_of_tuned_timeouts() -> Iterator[Cluster]:
    """TCPTimeout alone is what matters after the loss of a batch host."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(settings={"TCPTimeout": "1"}) as cluster:
        yield cluster


def test_with_the_controller_away_it_is_done_later_and_once(defaults: Cluster) -> None:
    """Two processes ask while slurmctld is down; once it is back the job is requeued one time, off the bad node."""
    slurm = CommandSlurm(runner_on(defaults.nodes["n4"]), deadline_s=2.0)
    job = begin(defaults, slurm)
    saved = defaults.folder / "state/job_state"
    began = time.time()
    wait_until(lambda: saved.exists() and saved.stat().st_mtime > began, "the state is saved")
    defaults.stop_controller()
    said: list[str] = []
    done: list[Requeued] = []

    def ask(bad: Sequence[str]) -> None:
        done.append(requeue_now(slurm, job.id, ExcludedNodes(unfit=tuple(bad)), restarts=0, say=said.append))

    askers = [threading.Thread(target=ask, args=[[job.nodes[0]]]) for _ in range(2)]
    for asker in askers:
        asker.start()
    wait_until(lambda: sum("will be asked again" in sentence for sentence in said) == 2, "both have noticed")
    defaults.start_controller()
    for asker in askers:
        asker.join(60)
    assert len(done) == 2
    wait_until(lambda: resumed(defaults, slurm, job.id), "the job runs again")
    assert job.nodes[0] not in starts(defaults)[1]


@pytest.mark.parametrize("hold", ["hold", "uhold", "requeuehold"])
def test_a_hold_that_a_person_has_set_stays(cluster: Cluster, hold: str) -> None:
    """Of a job that runs, too, for its next start. By hand the command says so, and fails."""
    user = CommandSlurm(runner_on(cluster.controller, "nobody"))
    job = begin(cluster, user).id
    cluster.controller.run("scontrol", hold, str(job), user="root" if hold == "uhold" else "nobody")
    if hold != "requeuehold":
        assert requeue_now(user, job).held == "JobHeldUser"
    reason, by = (
        ("job requeued in held state", " (scontrol requeuehold)") if hold == "requeuehold" else ("JobHeldUser", "")
    )
    wait_until(lambda: (user.jobs([job])[0].state, user.jobs([job])[0].reason) == ("pending", reason), "the job waits")
    began = user.jobs([job])[0].starts_at
    said = cluster.nodes["n4"].run(*OPSD.split(), "requeue", str(job), user="nobody", check=False)
    assert (said.returncode, said.stdout) == (exitcodes.FAILED, "")
    assert said.stderr == (
        f"opsd: job {job} is on hold ({reason}), which somebody has set{by} and which stays; scontrol "
        f"release {job} lets it start\n"
    )
    said = cluster.nodes["n4"].run(*OPSD.split(), "requeue", "--json", str(job), user="nobody", check=False)
    assert (json.loads(said.stdout)["state"], json.loads(said.stdout)["held"]) == ("pending", reason)
    [found] = user.jobs([job])
    assert (found.state, found.reason) == ("pending", reason)
    assert found.starts_at in (began, None)  # the scheduler itself takes its estimate back


def test_a_job_whose_start_failed_is_tried_once_more(tmp_path: Path) -> None:
    """After a prolog that fails Slurm holds the job and drains the node. No person has asked for the hold."""
    if reason := missing():
        pytest.skip(reason)
    prolog = tmp_path / "prolog"
    prolog.write_text(f"#!/bin/sh\ntest ! -e {tmp_path}/fail\n")
    prolog.chmod(0o755)
    (tmp_path / "fail").touch()
    with Cluster(settings={**FAST, "Prolog": str(prolog)}) as cluster:
        user = CommandSlurm(runner_on(cluster.controller, "nobody"))
        job = user.submit("#!/bin/sh\nsleep 600\n", ["-N1", "--mem=100M", "--requeue", "--output=/dev/null"])
        wait_until(lambda: "launch" in user.jobs([job])[0].reason, "Slurm holds the job")
        again = cluster.nodes["n4"].run(*OPSD.split(), "requeue", str(job), user="nobody", check=False)
        assert "is tried once more" in again.stdout, again
        (tmp_path / "fail").unlink()
        wait_until(lambda: user.jobs([job])[0].state == "pending", "it waits")
        cluster.nodes["n4"].run(*OPSD.split(), "requeue", str(job), user="nobody", check=False)
        wait_until(lambda: user.jobs([job])[0].state == "running", "the job runs")


@pytest.mark.parametrize("default", ["train", "dev"])
def test_a_helper_that_may_never_start_is_not_left_in_the_queue(cluster: Cluster, default: str) -> None:
    """Its job's partition takes no job of one node. That of another partition does the same, if that is the default."""
    slurm = CommandSlurm(runner_on(cluster.controller))
    user = CommandSlurm(runner_on(cluster.controller, "nobody"))
    cluster.controller.run("scontrol", "update", "partitionname=train", "minnodes=2")
    cluster.controller.run("scontrol", "update", f"partitionname={default}", "default=yes")
    try:
        job = begin(cluster, user, "--partition=train", "--exclude=n4")
        victim = next(name for name in job.nodes if name != job.batch_host)
        (cluster.shared / f"tell-{job.batch_host}").write_text(victim)
        said = cluster.shared / f"said-{job.batch_host}"
        wait_until(lambda: slurm.jobs([job.id])[0].restarts == 1, "the job is requeued")
        if default == "dev":
            wait_until(lambda: resumed(cluster, slurm, job.id), "the job runs again", 60)
        else:
            assert "may start up to three minutes late: Slurm would not start" in said.read_text()
        wait_until(lambda: [found.id for found in slurm.jobs()] == [job.id], "no helper is left")
    finally:
        cluster.controller.run("scontrol", "update", "partitionname=train", "minnodes=0", "default=yes")


def test_what_cannot_be_requeued_is_refused(cluster: Cluster) -> None:
    """A job of somebody else, a node that is not the job's, and one that has ended: a sentence, and nothing is done."""
    root = CommandSlurm(runner_on(cluster.nodes["n4"]))
    job = begin(cluster, root, "--exclude=n4")
    with pytest.raises(SlurmDenied, match="owner of the job"):
        requeue_now(CommandSlurm(runner_on(cluster.nodes["n4"], "nobody")), job.id)
    unknown = cluster.nodes["n4"].run(*OPSD.split(), "requeue", "4242", check=False)
    assert unknown.returncode == exitcodes.FAILED
    assert unknown.stderr == "opsd: there is no job 4242 that waits or runs and that this user may see\n"
    with pytest.raises(SlurmRejected, match=f"job {job.id} does not run on n4; nothing was done"):
        requeue_now(root, job.id, ExcludedNodes(lost=("n4",)))
    assert all(node.usable for node in root.nodes())
    root.cancel(job.id)
    wait_until(lambda: not root.jobs([job.id]), "the job has ended")
    with pytest.raises(SlurmRejected, match=f"no job {job.id} that"):
        requeue_now(root, job.id)
