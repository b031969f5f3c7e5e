"""One piece of evidence opens one incident, and what was true at its time is not taken back."""

from dataclasses import replace

import pytest

from opsd.agent import incidents, lifecycle
from opsd.agent.incidents import IncidentTable, reduce, settled_by, shifted
from opsd.agent.lifecycle import IncidentRules, Observed
from opsd.runbooks.base import Culprit, Evidence, Finding, Severity

RULES = {"gpu_xid": IncidentRules(clear_after_s=2.0)}
XID = Finding(
    kind="gpu_xid",
    key="GPU-0001",
    severity=Severity.WARNING,
    summary="GPU 1: Xid 94",
    culprit=Culprit("gpu", "n01", 1, 5, "Xid 94"),
    confidence=0.9,
    evidence=(Evidence("Xid 94", "kmsg", 100.0),),
    job="4242",
    run="smol",
    struck_at=100.0,
)


def ended_book():
    """A table whose only incident was healed."""
    table, _, _ = reduce(IncidentTable(), Observed([XID]), RULES, 101.0)
    (incident,) = table.incidents.values()
    for now in (102.0, 103.0, 104.0):
        table, ended, _ = reduce(table, Observed(healed={incident.id: True}), RULES, now)
        if ended:
            return table, ended
    raise AssertionError("the incident did not end")


@pytest.mark.parametrize("step", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("jitter", [0.0, 6e-5, 2.0])
def test_evidence_of_an_ended_incident_opens_no_second_one(step, jitter):
    """The proof of health can vanish with the run; a step of the clock, and a time told again, change nothing."""
    table, _ = ended_book()
    table = shifted(table, step)
    late = replace(XID, struck_at=100.0 + step + jitter, culprit=Culprit("gpu", "n01", 1), job="")
    after, _, transitions = reduce(table, Observed([late]), RULES, 200.0 + step)
    assert not after.incidents
    assert transitions == ()


def test_a_newer_event_opens_an_incident():
    """Only what was settled is left alone."""
    table, _ = ended_book()
    _, _, transitions = reduce(table, Observed([replace(XID, struck_at=150.0)]), RULES, 150.5)
    assert [transition.before for transition in transitions] == [None]


def test_a_condition_that_lasts_opens_an_incident_again():
    """The driver can ask for a recovery after the Xid was healed."""
    table, _ = ended_book()
    _, _, transitions = reduce(table, Observed([replace(XID, struck_at=None)]), RULES, 150.0)
    assert len(transitions) == 1


def test_an_agent_that_starts_knows_what_was_settled():
    """The journal has the ended incidents; one of a clock that was ahead settles nothing that is to come."""
    _, ended = ended_book()
    assert settled_by(ended, 1000.0) == {("gpu_xid", "GPU-0001"): 100.0}
    assert settled_by([replace(ended[0], struck_at=5000.0)], 1000.0) == {("gpu_xid", "GPU-0001"): 1000.0}
    assert settled_by(ended, 100.0 + incidents.SETTLED_S) == {}


@pytest.mark.parametrize(
    ("rank", "job", "run"),
    [(None, "", ""), (2, "4243", "next")],
    ids=["the rank is gone", "another job has the GPU"],
)
def test_rank_job_and_run_are_those_at_the_time_of_the_evidence(rank, job, run):
    """The same Xid, judged while its rank is restarted or when another job has the GPU, blames the first one."""
    first = lifecycle.opened(XID, 101.0)
    later = replace(XID, culprit=Culprit("gpu", "n01", 1, rank, "Xid 94"), job=job, run=run)
    after = lifecycle.merged(first, later, 110.0)
    assert (after.culprit.rank, after.job, after.run) == (5, "4242", "smol")
