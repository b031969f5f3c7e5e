"""Hardware is changed, and a node drained, on the word of kernel and drivers only; others are heard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from opsd.collectors.base import NoData, Reading, Sample
from opsd.runbooks.base import Action, Culprit, Evidence, Finding, Incident, Severity, View
from tests.fakes.agent import Agent, runbook
from tests.fakes.clock import eventually
from tests.fakes.collectors import VALUE, FakeCollector

FAULTY, FAILED = 1.0, 2.0


def detect(view: View) -> Iterator[Finding]:
    worst = max((series.last or 0.0 for series in view.select(VALUE.name)), default=0.0)
    if worst:
        severity = Severity.CRITICAL if worst == FAILED else Severity.WARNING
        yield Finding("x", severity, "s", Culprit("gpu"), 1.0, (Evidence("e", "s", view.wall),))


def remedy(incident: Incident, _view: View) -> Sequence[Action]:
    told = Action("notify", "node", reason="told")
    failed = incident.severity is Severity.CRITICAL
    return (Action("set_power_limit", "gpu", {"gpu": 0, "watts": 500}), told) if failed else (told,)


class Node:
    """An agent with a driver and an exporter that say what the test has them say."""

    def __init__(self, folder: Path, driver: float, exporter: float, open_after_s: float = 0.0) -> None:
        self.says = {"driver": driver, "exporter": exporter}
        self.limits: list[float] = []
        collectors = [FakeCollector(name, lambda name=name: self._reading(name)) for name in self.says]
        book = runbook(detect=detect, remedy=remedy, needs=(), open_after_s=open_after_s)
        self.agent = Agent(
            folder, collectors, [book], witnesses=["driver"],
            set_power_limit=lambda _gpu, watts: self.limits.append(watts),
        )  # fmt: skip

    def _reading(self, name: str) -> Reading | NoData:
        return Reading((Sample(VALUE, self.says[name], (name,)),))

    def refusals(self) -> list[str]:
        (incident,) = self.agent.incident_manager.current
        return [
            str(a["detail"]) for a in incident.actions if a["verb"] == "set_power_limit" and a["outcome"] == "refused"
        ]


@pytest.mark.parametrize("driver", [0.0, FAULTY])
def test_an_exporter_alone_is_heard_and_changes_nothing(tmp_path: Path, driver: float) -> None:
    """Nor does it make a smaller fault, which the driver knows of, a greater one. People are told."""
    node = Node(tmp_path, driver, FAILED)
    node.agent.tick(2)
    assert node.refusals() == ["neither kernel nor driver gives a reason for it now"]
    assert eventually(lambda: bool(node.agent.told))
    assert node.limits == []


def test_once_the_driver_says_so_it_is_done(tmp_path: Path) -> None:
    """What was refused a second ago is not refused for good."""
    node = Node(tmp_path, 0.0, FAILED)
    node.agent.tick(2)
    assert node.limits == []
    node.says["driver"] = FAILED
    node.agent.tick(2)
    assert eventually(lambda: node.limits == [500.0])


def test_a_driver_that_has_taken_it_back_stops_the_action(tmp_path: Path) -> None:
    """Its word counts in the second in which the action would begin, not that of the opening."""
    node = Node(tmp_path, FAILED, FAILED, open_after_s=2.0)
    node.agent.tick(2)
    node.says["driver"] = 0.0
    node.agent.tick(2)
    assert node.limits == []
    assert node.refusals()
