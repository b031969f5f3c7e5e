"""Whose budget an action is counted on, and what costs none."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from opsd.agent.actions import ActionError
from opsd.agent.policy import HOUR_S
from opsd.collectors.base import Reading, RunFact
from opsd.runbooks.base import Action, Evidence, Incident, View
from opsd.settings.policy import PolicySettings
from tests.fakes.agent import Agent, runbook
from tests.fakes.clock import until
from tests.fakes.collectors import FakeCollector
from tests.fakes.incidents import finding

ONCE = PolicySettings(cooldown_s=0, max_actions_per_hour=1, drain=True)


def agent(folder: Path, remedies: Mapping[str, Action], **changes: object) -> Agent:
    """One that may act once an hour, for whose run and node there is a ``remedy`` each, by the key of the finding."""
    run = RunFact("r", "", "node", "running", 0, os.getpid(), True, 1, str(folder / "r/control.sock"), "/r", "/r", 1001)

    def detect(view: View) -> Iterator[object]:
        for key in remedies:
            yield finding(key=key, evidence=(Evidence("too hot", "nvml", view.wall),))

    def remedy(incident: Incident, _view: View) -> Sequence[Action]:
        return (remedies[incident.key],)

    book = runbook(detect=detect, remedy=remedy, healed=lambda _incident, _view: False)
    return Agent(folder, [FakeCollector("source", lambda: Reading(facts=(run,)))], [book], limits=ONCE, **changes)


def done(agent: Agent) -> list[tuple[str, str]]:
    """Verb and outcome of each action of the incidents there are, once none is under way."""

    def over() -> list[tuple[str, str]]:
        agent.tick()
        actions = [(str(a["verb"]), str(a["outcome"])) for i in agent.incident_manager.current for a in i.actions]
        return actions if actions and "running" not in dict(actions).values() else []

    return until(over)


def test_a_user_whose_run_has_had_its_actions_does_not_keep_the_node_in_service(tmp_path: Path) -> None:
    """A swap is about the node, though it names the run's launcher: it is not of that user's budget."""
    drained: list[str] = []
    control = {"run": "r", "control": str(tmp_path / "r/control.sock")}
    restart = Action("restart_generation", "r", control, "it hangs")
    swap = Action("swap_node", "node", {**control, "node": "node"}, "broken")
    both = agent(tmp_path, {"a": restart, "b": swap}, drain_node=lambda node, _why: drained.append(node) or "drained")
    assert dict(done(both))["swap_node"] == "ok"
    assert drained == ["node"]


def test_what_was_refused_on_the_way_costs_nothing(tmp_path: Path) -> None:
    """As nothing has been changed, the next attempt is the first of the hour."""
    limits: list[float] = []

    def lower(_gpu: int, watts: float) -> None:
        limits.append(watts)
        if len(limits) == 1:
            raise ActionError("not this time")

    one = agent(tmp_path, {"a": Action("set_power_limit", "gpu0", {"gpu": 0, "watts": 500})}, set_power_limit=lower)
    began = one.clock.wall()
    until(lambda: one.tick() or len(limits) == 2)
    assert one.clock.wall() - began < HOUR_S
    assert ("set_power_limit", "ok") in done(one)
