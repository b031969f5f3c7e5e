"""A symptom in the running agent: it does nothing, it is listed below its root, and it outlives a restart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from opsd.agent.web import api
from opsd.collectors.base import Reading
from opsd.runbooks.base import Action, Culprit, Finding, Runbook
from tests.fakes.agent import Agent, runbook
from tests.fakes.clock import FakeClock
from tests.fakes.collectors import FakeCollector
from tests.fakes.facts import rank
from tests.fakes.incidents import finding


class Trouble:
    """A runbook of ``kind`` about GPU 2 that finds it while ``there`` and tells people about it."""

    def __init__(self, kind: str, *, there: bool = True) -> None:
        self.kind, self.there = kind, there

    def runbook(self) -> Runbook:
        tell = Action("notify", "node", reason=f"{self.kind} on GPU 2")
        return runbook(
            kind=self.kind,
            detect=self._detect,
            healed=lambda _incident, _view: not self.there,
            remedy=lambda _incident, _view: (tell,),
            clear_after_s=2.0,
        )

    def _detect(self, _view: object) -> Iterable[Finding]:
        culprit = Culprit("gpu", "node", 2, 2)
        return [finding(self.kind, culprit=culprit, data={"gpu": 2, "run": "smol"})] if self.there else []


def agent(folder: Path, *troubles: Trouble, clock: FakeClock | None = None) -> Agent:
    source = FakeCollector("source", lambda: Reading(facts=(rank(2),)))
    return Agent(folder, [source], [trouble.runbook() for trouble in troubles], clock=clock)


def listed(agent: Agent) -> list[tuple[str, list[str]]]:
    """Kind and kinds of symptoms of each current incident in the API's list."""
    found = api.incident_list(agent.loop.snapshot, ["current"])["incidents"]
    return [(i["kind"], [symptom["kind"] for symptom in i["symptoms"]]) for i in found]


def test_only_the_root_is_listed_and_acted_on(tmp_path: Path) -> None:
    """The straggler hangs below the throttle, is still found by its id, and costs nothing twice."""
    running = agent(tmp_path, Trouble("straggler"), Trouble("gpu_throttle"))
    running.tick(3)
    assert listed(running) == [("gpu_throttle", ["straggler"])]
    (root,) = api.incident_list(running.loop.snapshot, nested=True)["incidents"]
    (symptom,) = root["symptoms"]
    assert symptom["cause"] == root["id"]
    assert symptom["actions"] == []
    assert root["joint_gpu_seconds"] < root["cost"]["gpu_seconds"] + symptom["cost"]["gpu_seconds"]
    assert api.find(running.loop.snapshot, symptom["id"]) is not None


def test_a_symptom_ends_with_its_root_or_after_it(tmp_path: Path) -> None:
    """It is over first and yet stays until the throttle is over."""
    straggler, throttle = Trouble("straggler"), Trouble("gpu_throttle")
    running = agent(tmp_path, straggler, throttle)
    running.tick(3)
    straggler.there = False
    running.tick(10)
    assert listed(running) == [("gpu_throttle", ["straggler"])]
    throttle.there = False
    running.tick(10)
    assert listed(running) == []
    ended = {i.kind: i.resolved_at for i in running.loop.snapshot.ended}
    assert ended["straggler"] >= ended["gpu_throttle"]


def test_a_root_that_turns_up_later_adopts(tmp_path: Path) -> None:
    """First the straggler is an incident of its own."""
    throttle = Trouble("gpu_throttle", there=False)
    running = agent(tmp_path, Trouble("straggler"), throttle)
    running.tick(3)
    assert listed(running) == [("straggler", [])]
    throttle.there = True
    running.tick(2)
    assert listed(running) == [("gpu_throttle", ["straggler"])]


def test_the_journal_keeps_what_belongs_together(tmp_path: Path) -> None:
    """After a restart the symptom still knows its cause, and is not told again."""
    before = agent(tmp_path, Trouble("straggler"), Trouble("gpu_throttle"))
    before.tick(3)
    before.journal.close()
    after = agent(tmp_path, Trouble("straggler"), Trouble("gpu_throttle"), clock=before.clock)
    links = {i.kind: i.cause for i in after.incident_manager.current}
    assert links["straggler"] == next(i.id for i in after.incident_manager.current if i.kind == "gpu_throttle")
    after.tick(2)
    assert listed(after) == [("gpu_throttle", ["straggler"])]
