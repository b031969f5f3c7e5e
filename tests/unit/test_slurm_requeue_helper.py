"""A requeue from within the job, finished by a helper job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opsd.slurm.allocation import allocation
from opsd.slurm.port import SlurmRejected
from opsd.slurm.requeue import ExcludedNodes, Requeued, requeue_now
from opsd.slurm.requeue_helper import helper_of, requeue_from_inside
from tests.fakes.clock import FakeClock
from tests.fakes.requeue import HELPER, FakeQueue, queue

OWN = allocation(
    {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_PARTITION": "train", "SLURM_JOB_ACCOUNT": "lab", "SLURM_JOB_QOS": "large",
    }
)  # fmt: skip


def test_a_launcher_leaves_the_end_to_another_job() -> None:
    """It will be killed by the requeue: before that it submits a small job that sees it through, off the bad nodes."""
    slurm = queue(dead=("n2",), restarts=2)
    done = requeue_from_inside(slurm, OWN, ExcludedNodes(("n2",), ("n3",), "opsd:4 node_lost"), command=["opsd"])
    assert done == Requeued(7, "completing", 2, handed_over=True)
    assert slurm.calls == ["drain n2", "down n2", "requeue"]
    [(script, options)] = slurm.submitted
    assert script == (
        "#!/bin/sh\n(: >>/dev/null) 2>/dev/null && exec >>/dev/null 2>&1\n"
        "exec opsd requeue 7 --restarts=2 --lead=30 --log=/dev/null --limit=900 '--reason=opsd:4 node_lost' "
        "--lost=n2 --without=n3\n"
    )
    assert {"--partition=train", "--account=lab", "--exclude=n[2-3]", "--no-requeue", "--nodes=1"} <= set(options)


def test_what_was_decided_of_an_earlier_start_does_not_end_this_one() -> None:
    """Number of restarts and patience are the caller's for the job that attends to it as well."""
    slurm = queue(dead=("n2",), restarts=2)
    done = requeue_from_inside(slurm, OWN, ExcludedNodes(("n2",)), restarts=1, limit_s=3600.0, command=["opsd"])
    assert (done.restarts, slurm.calls) == (2, [])
    [(script, options)] = slurm.submitted
    assert "--restarts=1 --lead=30 --log=/dev/null --limit=3600 " in script
    assert "--time=65" in options


@pytest.mark.parametrize(("room", "calls"), [(True, []), (False, ["drain n1", "down n1", "requeue"])])
def test_without_the_batch_host_all_is_left_to_the_helper(room: bool, calls: list[str]) -> None:
    """Once it runs the launcher may go, and must, before the job can stop; in a full cluster it requeues itself."""
    slurm, clock = queue(dead=("n1",), restarts=2, room=room), FakeClock()
    done = requeue_from_inside(slurm, OWN, ExcludedNodes(("n1",)), clock=clock.monotonic, sleep=clock.advance)
    assert done.handed_over
    assert slurm.calls == calls


def test_a_launcher_waits_for_the_controller_before_it_ends_its_job() -> None:
    """Without a helper nothing would start the job at once."""
    slurm, clock, said = queue(dead=("n2",), restarts=2, away=range(1, 31)), FakeClock(), list[str]()
    done = requeue_from_inside(
        slurm, OWN, ExcludedNodes(("n2",)), clock=clock.monotonic, sleep=clock.advance, say=said.append
    )  # fmt: skip
    assert done.handed_over
    assert (len(slurm.submitted), slurm.calls) == (1, ["drain n2", "down n2", "requeue"])
    assert sum("will be asked again" in sentence for sentence in said) == 1


def test_a_job_that_its_user_has_cancelled_is_left_alone() -> None:
    """It stops without a restart being counted: nobody is submitted to see to the next one."""
    slurm = queue(restarts=2)
    slurm.job = replace(slurm.job, state="completing")
    with pytest.raises(SlurmRejected, match="is being ended and is not put back into the queue"):
        requeue_from_inside(slurm, OWN, ExcludedNodes(("n2",)))
    assert (slurm.submitted, slurm.calls) == ([], [])


def attend(slurm: FakeQueue, excluded: ExcludedNodes) -> Requeued:
    """What the helper does, from the begin of the requeue to its own end."""
    clock = FakeClock()
    own = replace(OWN, job=HELPER, nodes=("n4",))
    helper = helper_of(slurm, own, 7, excluded, restarts=2, limit_s=900.0, log="requeue.log", command=["opsd"])
    return requeue_now(
        slurm, 7, excluded, restarts=2, helper=helper, clock=clock.monotonic, now=clock.wall, sleep=clock.advance,
        say=lambda sentence: None,
    )  # fmt: skip


def test_the_job_starts_when_its_helper_has_freed_its_node() -> None:
    """A job with a range of nodes would start without that one, and so without its spare."""
    slurm = queue(dead=("n2",), restarts=2)
    assert attend(slurm, ExcludedNodes(("n2",))).state == "pending"
    assert slurm.calls == ["drain n2", "down n2", "requeue", f"after {HELPER}", "start"]
    assert slurm.submitted == []


def test_whether_a_job_can_do_without_its_excluded_nodes_is_seen_by_another_helper() -> None:
    """Slurm holds it if not, when it tries to start it: the first helper has ended then, and a held job is not lost."""
    slurm = queue(dead=("n2",), restarts=2, operator=False)
    assert attend(slurm, ExcludedNodes(("n2",))).avoided == ("n2",)
    assert slurm.calls[-3:] == ["exclude n2", f"after {HELPER}", "start"]
    [(script, options)] = slurm.submitted
    assert script == (
        "#!/bin/sh\n(: >>requeue.log) 2>/dev/null && exec >>requeue.log 2>&1\n"
        "exec opsd requeue 7 --restarts=2 --limit=900 '--reason=opsd:requeue node_lost' --lost=n2\n"
    )
    assert {"--begin=now+30", "--deadline=now+80minutes", "--time=20", "--output=/dev/null", "--qos=large"} <= set(
        options
    )


@pytest.mark.parametrize("away", range(1, 36))
def test_one_job_looks_again_whenever_the_controller_is_away(away: int) -> None:
    """A request that Slurm has not heard is repeated, and no other."""
    slurm = queue(dead=("n2",), restarts=2, operator=False, away={away})
    assert attend(slurm, ExcludedNodes(("n2",))).avoided == ("n2",)
    assert len(slurm.submitted) == 1


@pytest.mark.parametrize("refused", ["submit", "start_after"])
def test_a_helper_whose_end_nobody_waits_for_stays(refused: str) -> None:
    """It sees to the start itself where Slurm refuses another job, or the order of the two."""
    slurm = queue(dead=("n2",), restarts=2, operator=False, refuses=refused)
    assert attend(slurm, ExcludedNodes(("n2",))) == Requeued(7, "pending", 3, ("n2",))
    assert slurm.calls[-2:] == ["exclude n2", "start"]


@pytest.mark.parametrize(
    ("option", "reason", "tried", "is_left"),
    [
        ("--partition=train", "PartitionNodeLimit", 3, True),
        ("--nodes=1", "QOSMinCpuNotSatisfied", 3, False),
        ("--nodes=1", "Job's QOS not permitted to use this partition (train allows large not normal)", 3, False),
        ("--nodes=1", "AssocMaxWallDurationPerJobLimit", 3, False),
        ("--nodes=1", "QOSMaxJobsPerUserLimit", 1, True),
        ("--nodes=1", "Resources", 1, True),
    ],
)
def test_a_helper_that_never_starts_is_not_trusted(option: str, reason: str, tried: int, is_left: bool) -> None:
    """It is cancelled, tried with the job's QOS and in the default partition, else the job is requeued without one."""
    slurm, said = queue(dead=("n2",), restarts=2), list[str]()
    slurm.stuck = (option, reason)
    clock = FakeClock()
    done = requeue_from_inside(
        slurm, OWN, ExcludedNodes(("n2",)), clock=clock.monotonic, sleep=clock.advance, say=said.append
    )
    assert len(slurm.submitted) == tried
    assert slurm.calls.count(f"cancel {HELPER}") == tried - is_left
    assert done.handed_over is is_left
    assert any("may start up to three minutes late: Slurm would not start" in text for text in said) is not is_left
    assert "requeue" in slurm.calls
