"""Tests of idle nodes on a real Slurm: each in its turn, and at once out of the way of a job."""

from __future__ import annotations

import sys
import time

import pytest

from opsd.preflight.checks import CHECKS
from opsd.slurm import node_comment
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.node_comment import NodeHistory
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until
from tests.integration.slurm.templates import FOLDER

pytestmark = [pytest.mark.xdist_group("slurm"), pytest.mark.long]

CHECK = "numa"
OPSD = """#!/bin/sh
# opsd with one quick check, which waits while there is a file "slow".
export PYTHONPATH={path}
[ "$1" = preflight ] || exec {python} -m opsd "$@"
while [ -e {folder}/slow ]; do sleep 0.2; done
node=$SLURMD_NODENAME
exec {python} -m opsd "$@" --set=agent.node=$node --set=agent.state_dir=/run/opsd-$node \\
    --set=policy.return_profile=quick '--set=preflight.skip=[{skipped}]'
"""


def test_idle_nodes_are_tested_in_turn_and_give_way(cluster: Cluster) -> None:
    """The longest untested first; a job gets a node under test at once, and that test counts for nothing."""
    slurm, now = CommandSlurm(runner_on(cluster.controller)), time.time()
    skipped = ",".join(f'"{check.name}"' for check in CHECKS if "quick" in check.seconds and check.name != CHECK)
    opsd = cluster.shared / "opsd"
    opsd.write_text(OPSD.format(path=":".join(sys.path), folder=cluster.shared, python=sys.executable, skipped=skipped))
    opsd.chmod(0o755)
    for name, days in (("n1", 1), ("n2", 2), ("n3", 30)):
        slurm.set_comment(name, node_comment.write("", NodeHistory(tested_at=now - days * 86_400)))

    def begin() -> None:
        values = ("PARTITION=dev", "COUNT=1", "PROFILE=quick", f"OPSD={opsd}")
        cluster.controller.run("env", *values, str(FOLDER / "idle-checks.sh"))

    def tested(name: str) -> float:
        return node_comment.read(slurm.comments([name])[name]).tested_at

    begin()
    wait_until(lambda: tested("n4") >= int(now), "n4, which was never tested, is")
    cluster.wait_idle(60)
    (cluster.shared / "slow").touch()
    begin()
    wait_until(lambda: any(job.state == "running" for job in slurm.jobs(node="n3")), "n3 is under test")
    job = slurm.submit("#!/bin/sh\nsleep 60\n", ["--nodes=4", "--exclusive", "--partition=train", "--output=/dev/null"])
    wait_until(lambda: any(one.id == job and one.state == "running" for one in slurm.jobs()), "the job runs")
    (cluster.shared / "slow").unlink()
    assert [one.id for one in slurm.jobs()] == [job]
    assert tested("n3") < now - 86_400
    assert slurm.nodes(["n3"])[0].usable
