"""Which run an incident is about, and on which pages it therefore is."""

from __future__ import annotations

from typing import Any

import pytest

from opsd.agent.judge import Judge
from opsd.agent.lifecycle import merged, opened
from opsd.agent.store import from_json, to_json
from opsd.agent.web.history import History
from opsd.agent.web.job_page import job_page, node_of_job
from opsd.agent.window import Window
from opsd.collectors.base import RankFact, Reading
from opsd.runbooks.base import Culprit, Finding, Runbook
from tests.fakes import facts
from tests.fakes.agent import SILENT
from tests.fakes.incidents import finding, incident
from tests.unit.test_page import Structure, rank, run, snapshot
from tests.unit.test_page_job import MADE

HERE = Culprit("node", "node")


def run_of(found: Finding, *ranks: RankFact) -> str:
    """The run of the incident that ``found`` opens on a node with these ranks."""
    window = Window("node", seconds=60)
    window.begin(100.0, 1e9)
    window.add("ranks", Reading(facts=ranks))
    book = Runbook(lambda _: [found], lambda *_: False, kind="trouble")
    (judged,) = Judge([book], SILENT).findings(window)
    assert from_json(to_json(opened(judged, 1e9))).run == judged.run
    return judged.run


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "smol"),
        ({"culprit": Culprit("gpu", "node", 1)}, "other"),
        ({"culprit": Culprit("gpu", "node", 7)}, ""),
        ({"culprit": HERE}, ""),
        ({"culprit": HERE, "job": "77"}, "other"),
        ({"data": {"run": "said"}}, "said"),
        ({"run": "said"}, "said"),
    ],
)
def test_the_run_is_that_of_the_gpu_unless_the_finding_names_one(changes: dict[str, Any], named: str) -> None:
    """A GPU without ranks has none; what concerns the node concerns a run only if there is one."""
    two = facts.rank(0, job=""), facts.rank(1, run="other", job=str(changes.get("job", "")))
    assert run_of(finding(**{"job": "", **changes}), *two) == named


def test_what_concerns_the_node_concerns_its_only_run() -> None:
    """As long as it runs."""
    assert run_of(finding(culprit=HERE, job=""), facts.rank(0, job="")) == "smol"
    assert run_of(finding(culprit=HERE, job=""), facts.rank(0, job="", process=None)) == ""


def test_an_incident_keeps_its_run_when_the_rank_has_gone() -> None:
    """The finding then no longer knows it."""
    old = opened(finding(run="smol"), 1e9)
    assert merged(old, finding(run=""), 1e9 + 1).run == "smol"


def shown(id: str, job: str = "") -> str:
    known = (
        incident("a", job="", run="train", summary="GPU 1 failed"),
        incident("b", job="", run="other", summary="GPU 2 failed"),
        incident("c", job="4242", run="", summary="GPU 3 failed"),
        incident("d", job="4100", run="train", summary="GPU 4 failed"),
        incident("e", job="", run="", summary="GPU 5 failed"),
    )
    now = snapshot(incidents=known, runs=[run(job=job)], ranks=[rank(0, job=job)])
    page = job_page(now, History(), lambda _: MADE, id, "node-17", 1001.0)
    brief = node_of_job(now, id, "node-17", 1001.0)
    assert page is not None and brief is not None
    text = Structure(page).text
    assert all((i.summary in text) == (i.summary in {told.summary for told in brief.incidents}) for i in known)
    return ", ".join(i.id for i in known if i.summary in text)


def test_a_run_without_a_job_has_its_incidents_on_its_page() -> None:
    """Under its name; a job's number has those of the job, and a run's name those of all its jobs."""
    assert shown("train") == "a, d"
    assert shown("4242", "4242") == "a, c"
    assert shown("train", "4242") == "a, c, d"
