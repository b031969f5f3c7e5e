"""The description of the agent's API: valid, served, and true of every route's answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from openapi_spec_validator import validate

from opsd.agent.gather import Health, Source
from opsd.agent.loop import Snapshot
from opsd.agent.web.app import App, Request
from opsd.collectors import repairs
from opsd.collectors.base import Reading, RepairFact, RepairStep, Sample
from opsd.collectors.slurm import FLAG
from opsd.runbooks.base import Acknowledgement, Closing, Cost, State
from tests.fakes.collectors import FakeCollector
from tests.fakes.incidents import WALL, incident, known
from tests.fakes.schemas import Description
from tests.unit.test_page import gpu, rank, run, snapshot

FACTS = {"node": "n", "mode": "observe", "started_at": 1.0, "gpu_hour": 0.0, "currency": "EUR"}
CONFIG = {"reloads": 0, "loaded_at": 1.0, "problem": "", "needs_restart": []}
REPAIRS = (
    RepairFact("repair-1", "n", "gpu_xid", "Xid 95", 40.0, (RepairStep("reboot", 50.0, ok=True),), "returned", 60.0),
    RepairFact("repair-2", "n", "gpu_xid", "Xid 95", 70.0, (RepairStep("retest", 80.0),), None),
)


def full() -> Snapshot:
    """A snapshot in which every list of every answer has something."""
    root = incident("root", ack=Acknowledgement("ada", WALL, None), cost=Cost(gpu_seconds=math.nan))
    past = incident("past", state=State.RESOLVED, resolved_at=WALL + 9, closed=Closing("ada", WALL, "because"))
    strange = rank(
        1, gpu=None, process=None, steps=(replace(rank(1).steps[0], loss=math.nan),), workers=((7, "loader"),)
    )
    source = Source(FakeCollector("nvml"), health=Health.OK, reading=Reading())
    return snapshot(
        sources=(source,), incidents=(root, incident("symptom", cause="root")), ended=(past,), repairs=REPAIRS,
        gpus=[gpu(0, orphans=(3,)), gpu(1, lost="fell off the bus")], ranks=[rank(0), strange, rank(2, steps=())],
        runs=[run(), run("other", job="", user=None)],
    )  # fmt: skip


def app(shown: Snapshot) -> App:
    return App(lambda: shown, FACTS, stale_s=5.0, config=lambda: CONFIG)


def get(shown: Snapshot, path: str, **query: str) -> tuple[int, Any]:
    status, body, _ = app(shown)(Request(path, {name: [value] for name, value in query.items()}))
    return int(status), body.decode()


def described() -> Description:
    return Description(get(full(), "/api/v1/openapi.json")[1])


def test_the_description_that_is_served_is_valid() -> None:
    """By the specification of OpenAPI 3.1."""
    validate(json.loads(get(full(), "/api/v1/openapi.json")[1]))


@pytest.mark.parametrize("shown", [full(), Snapshot(-1, 0.0, 0.0)], ids=["full", "nothing yet"])
def test_every_route_answers_as_described(shown: Snapshot) -> None:
    """With much and with nothing to tell, with each parameter, and when it refuses."""
    description, seen = described(), set()
    ids = {"incidents": "root", "repairs": "repair-2", "jobs": "4242"}
    for path, item in description.document["paths"].items():
        filled = path.replace("{id}", ids.get(path.split("/")[3], ""))
        queries = [{p["name"]: "1"} for p in item["get"]["parameters"] if p["in"] == "query"]
        for query in ({}, *queries, {"state": "current"}, {"limit": "x"}):
            status, body = get(shown, filled, **query)
            assert description.errors(path, status, body) == []
            seen.add((path, status))
        if "{id}" in path:
            status, body = get(shown, path.replace("{id}", "nothing"))
            assert (status, description.errors(path, status, body)) == (404, [])
    if shown.incidents:
        assert json.loads(get(shown, "/api/v1/incidents/root")[1])["similar"]
    fine = {path for path, status in seen if status == 200}
    assert fine == set(description.paths) if shown.tick > 0 else fine
    assert {("/api/v1/incidents", 400), ("/api/v1/repairs", 400)} <= seen


def test_the_repair_in_the_status_is_as_described() -> None:
    """The status has one that is under way, and one that took the node out of service."""
    description = described()
    for found in (known("retest", 1, 12.0), known("rma", 2)):
        drained = Sample(FLAG, 1.0, ("drain",))
        status, body = get(snapshot(samples=(repairs.samples(found, 60.0), (drained,))), "/api/v1/status")
        assert json.loads(body)["repair"]["state"] in body
        assert description.errors("/api/v1/status", status, body) == []


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/api/v1/status", lambda answer: answer.pop("tick")),
        ("/api/v1/status", lambda answer: answer["gpus"][0].update(index="0")),
        ("/api/v1/status", lambda answer: answer.update(new=1)),
        ("/api/v1/incidents", lambda answer: answer["incidents"][0]["culprit"].pop("gpu")),
        ("/api/v1/incidents", lambda answer: answer["incidents"][0]["symptoms"][0].pop("kind")),
        ("/api/v1/incidents", lambda answer: answer["incidents"][0]["actions"][0].update(at="now")),
        ("/api/v1/ranks", lambda answer: answer["ranks"][0]["steps"][0].pop("loss")),
        ("/api/v1/repairs", lambda answer: answer["repairs"][0]["steps"][0].update(ok="yes")),
        ("/api/v1/node", lambda answer: answer.update(gpus=None)),
    ],
)
def test_an_answer_that_differs_is_noticed(path: str, change: Any) -> None:
    """A field that is gone, new, or of another type."""
    answer = json.loads(get(full(), path)[1])
    change(answer)
    assert len(described().errors(path, 200, json.dumps(answer))) == 1
