"""Incidents on the pages: equal ones are one row, and each has a page of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from opsd.agent.brief import brief, cost_now
from opsd.agent.web.app import App, Request
from opsd.agent.web.incident_page import incident_page, timeline
from opsd.agent.web.incidents import Listing, ended_card, grouped, incident_path, open_card
from opsd.runbooks.base import Cost, Culprit, Evidence, Incident, Severity, State
from tests.fakes.incidents import WALL, incident
from tests.unit.test_page import HOSTILE, Structure, snapshot


def throttled(gpu: int, **changes: Any) -> Incident:
    said = {"summary": f"GPU {gpu} is throttled", "culprit": Culprit("gpu", "node-17", gpu), "kind": "gpu_throttle"}
    return incident(f"throttle-{gpu}", **{**said, **changes})


def crash(id: str = "crash", **changes: Any) -> Incident:
    said = {"kind": "rank_crash", "severity": Severity.CRITICAL, "culprit": Culprit("rank", "node-17", rank=5)}
    return incident(id, **{**said, "summary": "rank 5 died of SIGSEGV", **changes})


def cards(*known: Incident) -> Structure:
    return Structure(open_card(Listing(known, WALL + 60, "node-17")).encode())


def test_equal_incidents_are_one_row() -> None:
    """With the number of GPUs and which; each is a link away. Graver ones come first."""
    found = cards(*(throttled(gpu) for gpu in (7, 0, 1, 2, 5)), crash())
    assert [tag for tag, _ in found.tags].count("summary") == 2
    assert "A GPU is throttled: 5 GPUs (0–2, 5, 7)" in found.text
    assert found.text.index("rank 5 died") < found.text.index("5 GPUs")
    links = [str(a["href"]) for tag, a in found.tags if tag == "a" and "/incident/throttle" in str(a["href"])]
    assert links == [f"/incident/throttle-{gpu}" for gpu in (0, 1, 2, 5, 7)]


def test_an_open_incident_says_who_acts_and_with_what() -> None:
    """Before its evidence, on every page that lists it; one of a group names the first. One that is over does not."""
    hot = throttled(3, evidence=(Evidence("as hot as that", "driver", WALL),), cost=Cost(text="a tenth"))
    text = re.sub(r"\s+", " ", cards(hot).text)
    told = brief(hot, "observe", "node-17")
    order = ("GPU 3 is throttled", "a tenth", told.acts, told.command, "as hot as that")
    assert [*map(text.index, order)] == sorted(map(text.index, order))
    group = cards(throttled(4), throttled(5))
    assert ("pre", {"class": "command"}) in group.tags and brief(
        throttled(4), "observe", "node-17"
    ).command in group.text
    over = replace(hot, resolved_at=WALL + 9, state=State.RESOLVED)
    assert "Who acts" not in Structure(ended_card(Listing([over], WALL + 60, "node-17")).encode()).text


def test_what_differs_in_what_matters_stays_apart() -> None:
    """Severity, kind, and whether it is over."""
    first = throttled(0)
    for other in (
        throttled(1, severity=Severity.CRITICAL),
        throttled(1, resolved_at=WALL, state=State.RESOLVED), throttled(1, kind="gpu_ecc"),
    ):  # fmt: skip
        assert len(grouped([first, other])) == 2
    assert len(grouped([first, throttled(1, state=State.ESCALATED)])) == 1


def test_equal_incidents_of_several_runs_are_one_row_that_names_them() -> None:
    """A rank's number means nothing without its run."""
    members = [crash(run, run=run, culprit=Culprit("rank", "node-17", rank=5)) for run in ("a", "b")]
    found = cards(*members)
    assert [tag for tag, _ in found.tags].count("summary") == 1
    assert "2 incidents of 2 runs" in found.text and "rank 5 of a, rank 5 of b" in found.text
    assert {"/job/a", "/job/b"} <= {str(a["href"]) for tag, a in found.tags if tag == "a"}
    assert "2 ranks (4–5)" in cards(*(crash(f"{n}", culprit=Culprit("rank", "n", rank=n)) for n in (4, 5))).text


def test_the_page_has_all_of_it() -> None:
    """What happened when, in order; evidence with its source, similar past ones, links to job and run, the runbook."""
    told = {"verb": "notify", "target": "", "outcome": "ok", "at": WALL + 1, "ended_at": WALL + 2}
    root = crash(
        job="4242", run="train", evidence=(Evidence("Xid 31 on GPU 5", "kernel log", WALL - 9),),
        opened_at=WALL, actions=(told,),
    )  # fmt: skip
    symptom = incident("symptom", cause="crash", summary="rank 1 waits", opened_at=WALL + 3)
    past = crash("past", summary="rank 2 died of SIGSEGV", opened_at=WALL - 9000, resolved_at=WALL - 8000)
    shown = snapshot(incidents=(root, symptom), ended=(past,))
    assert [moment.what for moment in timeline(root, [symptom])] == [
        "seen by kernel log", "opened", "action", "action ended", "symptom"
    ]  # fmt: skip
    found = Structure(incident_page(shown, root, "node-17"))
    text = re.sub(r"\s+", " ", found.text)
    for said in ("Xid 31 on GPU 5", "kernel log", "rank 1 waits", "rank 2 died", "What opsd does by itself", "notify"):
        assert said in text
    links = {a["href"] for tag, a in found.tags if tag == "a"}
    assert {"/job/4242", "/job/train", "/incident/symptom", "/incident/past", "/runbooks/rank_crash"} <= links
    below = Structure(incident_page(shown, symptom, "node-17"))
    assert "/incident/crash" in {a["href"] for tag, a in below.tags if tag == "a"}


def test_an_incident_that_is_over_says_when_and_how() -> None:
    """After a relapse as well; a kind of another release has no runbook here."""
    over = crash(
        kind="of_the_future", resolved_at=WALL + 90, state=State.RESOLVED, verdict="over by itself",
        relapses=2, reopened_at=WALL + 30,
    )  # fmt: skip
    assert [m.what for m in timeline(over, ())][-2:] == ["came back", "over"]
    text = re.sub(r"\s+", " ", Structure(incident_page(snapshot(ended=(over,)), over, "node-17")).text)
    assert "lasted 90 s" in text and "over by itself" in text and "None is remembered" in text


def test_an_incident_that_is_over_has_cost_what_it_did_in_all() -> None:
    """The share of the last moment, as the trouble faded, is no longer true; what is no share remains."""
    cost = Cost(0.0, 1800.0, "job 4242 loses less than 1% (16 GPUs, measured)", gpus=16)
    known = incident(cost=cost)
    assert cost_now(known) == f"{cost.text}; 0.50 GPU-hours so far"
    assert cost_now(replace(known, resolved_at=WALL + 60)) == "0.50 GPU-hours altogether"
    assert cost_now(replace(known, cost=replace(cost, gpus=0), resolved_at=WALL + 60)) == (
        f"{cost.text}; 0.50 GPU-hours altogether"
    )
    assert cost_now(incident(cost=Cost(gpu_seconds=84.0))) == "84 GPU-seconds so far"


def test_it_is_found_by_its_id_only() -> None:
    """Whatever is in an id, the link leads to its page; an unknown one has none."""
    odd = crash("crash/../a b")
    app = App(lambda: snapshot(incidents=(odd,)), {"node": "node-17"}, stale_s=5.0)
    status, body, headers = app(Request(incident_path(odd), {}))
    assert status == 200 and b"rank 5 died" in body and "default-src 'none'" in headers["Content-Security-Policy"]
    assert app(Request("/incident/crash", {}))[0] == 404 and app(Request("/incident/", {}))[0] == 404


def test_what_was_written_into_it_has_no_effect() -> None:
    """Script in any of its texts is text."""
    hostile = crash(
        HOSTILE, kind=HOSTILE, summary=HOSTILE, verdict=HOSTILE, job=HOSTILE, run=HOSTILE,
        evidence=(Evidence(HOSTILE, HOSTILE, WALL),), culprit=Culprit(HOSTILE, HOSTILE, detail=HOSTILE),
        actions=({"verb": HOSTILE, "target": HOSTILE, "outcome": HOSTILE, "at": WALL, "reason": HOSTILE},),
    )  # fmt: skip
    shown = snapshot(incidents=(hostile, incident("s", cause=HOSTILE, summary=HOSTILE)))
    listing = Listing([hostile, hostile], WALL, HOSTILE)
    for page in (incident_page(shown, hostile, HOSTILE), open_card(listing).encode()):
        found = Structure(page)
        assert not {tag for tag, _ in found.tags} & {"script", "img"}
        assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
