"""What the environment says of the job that a process belongs to."""

from __future__ import annotations

import time

import pytest

from opsd.slurm.allocation import AllocationError, allocation, cloud_addresses, in_job

STEP = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NODELIST": "n[008-010],login",
    "SLURMD_NODENAME": "n009",
    "SLURM_JOB_PARTITION": "train",
    "SLURM_JOB_ACCOUNT": "lab",
}


def test_a_first_start() -> None:
    """Nodes in Slurm's order with their padding; never restarted."""
    own = allocation(STEP)
    assert own.nodes == ("n008", "n009", "n010", "login")
    assert (own.job, own.node, own.restarts) == (4242, "n009", 0)
    assert own.same_queue == ("--partition=train", "--account=lab")
    assert in_job(STEP)
    assert not in_job({})


def test_a_restart() -> None:
    """The count of restarts is a number."""
    assert allocation({**STEP, "SLURM_RESTART_COUNT": "3"}).restarts == 3


def test_addresses_of_cloud_nodes() -> None:
    """Names that nobody resolves come with their addresses, of either kind."""
    told = {"SLURM_NODE_ALIASES": "n008:10.0.0.8:ip-10-0-0-8,n009:[fd00::9]:host,n010::"}
    assert cloud_addresses(told) == {"n008": "10.0.0.8", "n009": "fd00::9"}
    assert cloud_addresses({"SLURM_NODE_ALIASES": "(null)"}) == cloud_addresses({}) == {}


def test_ten_thousand_nodes_are_no_effort() -> None:
    """The largest clusters are expanded in well under a second."""
    began = time.monotonic()
    assert len(allocation({**STEP, "SLURM_JOB_NODELIST": "gpu[00001-10000]"}).nodes) == 10_000
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"SLURM_JOB_ID": ""}, "not inside a Slurm job"),
        ({"SLURM_JOB_ID": "12_3"}, "not inside a Slurm job"),
        ({"SLURM_JOB_NODELIST": ""}, "has no SLURM_JOB_NODELIST; start this with srun or sbatch"),
        ({"SLURM_JOB_NODELIST": "n[1-"}, "brackets do not match"),
        ({"SLURM_RESTART_COUNT": "many"}, "SLURM_RESTART_COUNT is 'many'"),
    ],
)
def test_a_torn_environment_is_named(change: dict[str, str], problem: str) -> None:
    """One sentence says what is missing or wrong."""
    with pytest.raises(AllocationError, match=problem):
        allocation({**STEP, **change})
