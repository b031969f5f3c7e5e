"""Ways between leaf switches on a real Slurm with a topology: measured by jobs of idle nodes that give way."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from opsd.slurm import node_comment
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.node_comment import NodeHistory
from tests.integration.slurm.cluster import Cluster, missing, runner_on, wait_until
from tests.integration.slurm.templates import FOLDER

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.long, pytest.mark.timeout(300)]

TOPOLOGY = """\
SwitchName=leaf1 Nodes=n[1-2]
SwitchName=leaf2 Nodes=n[3-4]
SwitchName=spine Switches=leaf[1-2]
"""
OPSD = """#!/bin/sh
# opsd as on a node of its own; a measurement waits while there is a file "slow".
export PYTHONPATH={path}
[ "$1" = preflight ] || exec {python} -m opsd "$@"
while [ -e {folder}/slow ]; do sleep 0.2; done
shift
node=$SLURMD_NODENAME
exec >{folder}/$node.log 2>&1
exec {python} -m opsd preflight --set=agent.node=$node --set=agent.state_dir=/run/opsd-$node "$@"
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two nodes below each of two leaf switches."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(topology=TOPOLOGY) as cluster:
        yield cluster


def test_the_way_between_two_leaves_is_measured_and_gives_way(cluster: Cluster) -> None:
    """First a job gets the nodes that are measuring at once; later the way is in the comments of both and not due."""
    slurm, now = CommandSlurm(runner_on(cluster.controller)), time.time()
    opsd = cluster.shared / "opsd"
    opsd.write_text(OPSD.format(path=":".join(sys.path), folder=cluster.shared, python=sys.executable))
    opsd.chmod(0o755)
    for name in cluster.nodes:
        slurm.set_comment(name, node_comment.write("", NodeHistory(tested_at=now)))

    def begin() -> None:
        cluster.controller.run("env", "PARTITION=dev", f"OPSD={opsd}", str(FOLDER / "idle-checks.sh"), timeout=60)

    def measured() -> dict[str, str]:
        histories = {name: node_comment.read(text) for name, text in slurm.comments().items()}
        return {name: path.leaf for name, history in histories.items() for path in history.paths if path.passed}

    (cluster.shared / "slow").touch()
    begin()
    wait_until(lambda: [job.state for job in slurm.jobs()] == ["running"], "a pair is measured")
    (pair,) = slurm.jobs()
    assert {name[1] in "12" for name in pair.nodes} == {True, False}
    job = slurm.submit("#!/bin/sh\nsleep 60\n", ["--nodes=4", "--exclusive", "--partition=train", "--output=/dev/null"])
    wait_until(lambda: [(one.id, one.state) for one in slurm.jobs()] == [(job, "running")], "the job runs")
    assert measured() == {}
    slurm.cancel(job)
    (cluster.shared / "slow").unlink()
    cluster.wait_idle(60)

    begin()
    wait_until(lambda: len(measured()) == 2, "a way is in two comments")
    assert {(name[1] in "12", leaf) for name, leaf in measured().items()} == {(True, "leaf2"), (False, "leaf1")}
    cluster.wait_idle(60)
    begin()
    assert slurm.jobs() == ()
