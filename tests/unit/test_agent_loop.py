"""The loop and the incident manager: from a finding to an action and its verification, through restarts and faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.collectors.base import NoData, Reading
from opsd.runbooks.base import Action, Cost, Evidence, Finding, Incident, Runbook, State, View
from opsd.settings.policy import PolicySettings
from tests.fakes.clock import eventually
from tests.fakes.collectors import Agent, FakeCollector, runbook
from tests.fakes.incidents import finding


class Trouble:
    """A GPU that is in trouble while ``on``, and a runbook that lowers its power limit."""

    def __init__(self) -> None:
        self.on = False
        self.limits: list[tuple[int, float]] = []
        self.repairs = True

    def set_power_limit(self, gpu: int, watts: float) -> None:
        self.limits.append((gpu, watts))
        self.on = self.on and not self.repairs

    def detect(self, view: View):
        if self.on:
            yield finding(evidence=(Evidence("too hot", "nvml", view.wall),), cost=Cost(0.1, 40.0))

    def healed(self, _incident: Incident, _view: View) -> bool:
        return not self.on

    def remedy(self, _incident: Incident, _view: View) -> tuple[Action, ...]:
        return (Action("set_power_limit", "gpu0", {"gpu": 0, "watts": 500}, "too hot"),)

    def runbook(self, **changes: object) -> Runbook:
        return runbook(detect=self.detect, healed=self.healed, remedy=self.remedy, clear_after_s=2.0, **changes)

    def agent(self, folder: Path, **changes: object) -> Agent:
        collectors = changes.pop("collectors", [FakeCollector("source")])
        books = changes.pop("runbooks", [self.runbook()])
        return Agent(folder, collectors, books, set_power_limit=self.set_power_limit, **changes)


@pytest.fixture
def trouble() -> Trouble:
    return Trouble()


def settle(agent: Agent, state: State) -> Incident:
    """Tick until the newest incident is in ``state``."""

    def there() -> bool:
        agent.tick()
        return any(i.state is state for i in (*agent.incident_manager.current, *agent.incident_manager.ended))

    assert eventually(there)
    return next(i for i in (*agent.incident_manager.current, *agent.incident_manager.ended) if i.state is state)


def test_trouble_is_found_acted_on_and_verified(tmp_path: Path, trouble: Trouble) -> None:
    """The whole way, with what was done and how it ended in the incident, the counters and the journal."""
    agent = trouble.agent(tmp_path)
    agent.tick(2)
    assert agent.metrics()["opsd_incidents_opened_total{trouble}"] == 0
    trouble.on = True
    resolved = settle(agent, State.RESOLVED)
    assert trouble.limits == [(0, 500.0)]
    assert [(a["verb"], a["outcome"]) for a in resolved.actions] == [("set_power_limit", "ok")]
    assert resolved.verdict == "over after attempt 1"
    metrics = agent.metrics()
    assert metrics["opsd_incidents_opened_total{trouble}"] == 1
    assert metrics["opsd_incidents_gpu_seconds_total{trouble}"] == 40
    assert metrics["opsd_actions_total{set_power_limit,ok}"] == 1
    assert sum(v for k, v in metrics.items() if k.startswith("opsd_incidents{")) == 0
    agent.journal.close(20)
    assert trouble.agent(tmp_path).incident_manager.ended[0] == resolved


@pytest.mark.parametrize(("mode", "outcomes"), [("observe", []), ("recommend", ["recommended"])])
def test_without_leave_nothing_is_touched(tmp_path: Path, trouble: Trouble, mode: str, outcomes: list[str]) -> None:
    """The incident is open, and in mode recommend it says what opsd would do, once."""
    agent = trouble.agent(tmp_path, mode=mode)
    trouble.on = True
    agent.tick(10)
    (incident,) = agent.incident_manager.current
    assert (incident.state, [a["outcome"] for a in incident.actions]) == (State.OPEN, outcomes)
    assert trouble.limits == []
    trouble.on = False
    assert settle(agent, State.RESOLVED).verdict == "over by itself"


def test_a_refusal_says_why_once(tmp_path: Path, trouble: Trouble) -> None:
    """The limit on actions an hour is reached: nothing happens, and the incident says so."""
    agent = trouble.agent(tmp_path, limits=PolicySettings(cooldown_s=0, max_actions_per_hour=0))
    trouble.on = True
    agent.tick(5)
    ((action,),) = [i.actions for i in agent.incident_manager.current]
    assert (action["outcome"], action["detail"]) == ("refused", "the limit of 0 actions an hour is reached")
    assert agent.metrics()["opsd_actions_total{set_power_limit,refused}"] == 1


def test_a_notification_goes_out_though_actions_are_refused(tmp_path: Path, trouble: Trouble) -> None:
    """Once, without being the attempt: what was refused is done as soon as it may be."""

    def remedy(incident: Incident, view: View) -> tuple[Action, ...]:
        return (*trouble.remedy(incident, view), Action("notify", "node", {}, "too hot"))

    agent = trouble.agent(
        tmp_path,
        runbooks=[replace(trouble.runbook(), remedy=remedy)],
        limits=PolicySettings(cooldown_s=0, max_actions_per_hour=0),
    )
    trouble.on = True
    assert eventually(lambda: agent.tick() or agent.told == ["too hot"])
    agent.tick(5)
    (incident,) = agent.incident_manager.current
    assert (incident.state, incident.attempts, agent.told) == (State.OPEN, 0, ["too hot"])
    assert {(a["verb"], a["outcome"]) for a in incident.actions} == {("set_power_limit", "refused"), ("notify", "ok")}


def test_an_open_incident_is_continued_after_a_restart(tmp_path: Path, trouble: Trouble) -> None:
    """The same id, the attempts and the history; the action is not repeated, and it opens no second incident."""
    trouble.repairs = False
    first = trouble.agent(tmp_path, limits=PolicySettings(cooldown_s=600, max_actions_per_hour=10))
    trouble.on = True
    before = settle(first, State.VERIFYING)
    first.journal.close(20)
    second = trouble.agent(tmp_path, limits=PolicySettings(cooldown_s=600, max_actions_per_hour=10), clock=first.clock)
    assert [i.id for i in second.incident_manager.current] == [before.id]
    second.tick(90)
    (incident,) = second.incident_manager.current
    assert (incident.id, incident.attempts, incident.opened_at) == (before.id, 1, before.opened_at)
    assert incident.actions[-1]["outcome"] == "refused"
    assert len(trouble.limits) == 1
    assert second.metrics()["opsd_incidents_opened_total{trouble}"] == 0


def test_a_slow_action_does_not_stop_the_loop(tmp_path: Path, trouble: Trouble) -> None:
    """Ticks go on while a driver call hangs; the incident is acting until the outcome is in."""
    release = threading.Event()
    trouble.on = True
    agent = Agent(
        tmp_path, [FakeCollector("source")], [trouble.runbook()], set_power_limit=lambda gpu, watts: release.wait(20)
    )
    agent.tick(5)
    assert [i.state for i in agent.incident_manager.current] == [State.ACTING]
    release.set()
    trouble.on = False
    assert settle(agent, State.RESOLVED).attempts == 1


def test_a_blind_runbook_judges_nothing(tmp_path: Path, trouble: Trouble) -> None:
    """Without its collector nothing is found, nothing is done, and nothing is called healed."""
    source = FakeCollector("source")
    agent = trouble.agent(tmp_path, collectors=[source], mode="observe")
    trouble.on = True
    agent.tick(2)
    trouble.on = False
    source.answer = lambda: NoData("the driver is gone")
    agent.tick(20)
    assert [i.state for i in agent.incident_manager.current] == [State.OPEN]
    source.answer = Reading
    assert settle(agent, State.RESOLVED)


@pytest.mark.parametrize("part", ["detect", "diagnose", "healed", "remedy"])
def test_a_runbook_that_raises_is_counted_and_the_others_go_on(tmp_path: Path, trouble: Trouble, part: str) -> None:
    """A bug in one file costs that file's kind only."""

    def bug(*_args: object) -> None:
        raise ZeroDivisionError

    broken = replace(trouble.runbook(), kind="broken", detect=lambda _view: [finding("broken", "x")])
    agent = trouble.agent(tmp_path, runbooks=[replace(broken, **{part: bug}), trouble.runbook()])
    trouble.on = True
    agent.tick(3)
    assert agent.metrics()["opsd_runbook_errors_total{broken}"] > 0
    assert agent.metrics()["opsd_runbook_errors_total{trouble}"] == 0
    assert "trouble" in {i.kind for i in agent.incident_manager.current}


def test_what_a_runbook_found_before_it_failed_counts(tmp_path: Path, trouble: Trouble) -> None:
    """The data of one user that it cannot stand do not hide the fault of another."""

    def fails(_view: View) -> Iterator[Finding]:
        yield finding("broken", "x")
        raise ZeroDivisionError

    agent = trouble.agent(tmp_path, runbooks=[replace(trouble.runbook(), kind="broken", detect=fails)])
    agent.tick(3)
    assert agent.metrics()["opsd_runbook_errors_total{broken}"] > 0
    assert [i.kind for i in agent.incident_manager.current] == ["broken"]


def test_what_a_failed_collector_delivered_is_not_shown(tmp_path: Path) -> None:
    """Its series vanish, so that nobody takes an old value for the state of the node."""
    source = FakeCollector("source")
    agent = Agent(tmp_path, [source], [runbook()])
    agent.tick()
    assert agent.metrics()["opsd_fake_value{source}"] == 1
    source.answer = lambda: NoData("gone")
    agent.tick()
    metrics = agent.metrics()
    assert "opsd_fake_value{source}" not in metrics
    assert (metrics["opsd_collector_state{source,no_data}"], metrics["opsd_collector_state{source,ok}"]) == (1, 0)
    assert metrics["opsd_collector_up{source}"] == 0


def test_runbooks_see_how_the_collectors_stand(tmp_path: Path) -> None:
    """A driver that does not answer is found by the state of its collector, which itself delivers nothing."""

    def detect(view: View):
        if any(series.last for series in view.select("opsd_collector_state", collector="source", state="error")):
            yield finding()

    def answer() -> Reading:
        raise OSError("no answer")

    agent = Agent(tmp_path, [FakeCollector("source", answer)], [runbook(detect=detect, needs=())])
    agent.tick(2)
    assert [incident.kind for incident in agent.incident_manager.current] == ["trouble"]


def test_a_step_of_the_clock_opens_and_closes_nothing(tmp_path: Path, trouble: Trouble) -> None:
    """An hour forward or back: the incident goes on, and is still acted on."""
    agent = trouble.agent(tmp_path, mode="recommend")
    trouble.on = True
    agent.tick()
    for step in (3600, -7200):
        agent.clock.wall_now += step
        agent.tick(2)
        assert [i.state for i in agent.incident_manager.current] == [State.OPEN]
    assert [a["outcome"] for a in agent.incident_manager.current[0].actions] == ["recommended"]


@pytest.mark.parametrize("step", [3600, -3600])
def test_a_step_of_the_clock_ends_no_cool_down_and_makes_none_longer(
    tmp_path: Path, trouble: Trouble, step: float
) -> None:
    """What was done a minute ago was done a minute ago, whatever the wall clock says since."""
    agent = trouble.agent(tmp_path, limits=PolicySettings(cooldown_s=100))
    trouble.on = True
    settle(agent, State.RESOLVED)
    agent.clock.wall_now += step
    agent.tick(5)
    trouble.on = True
    agent.tick(5)
    assert [a["outcome"] for i in agent.incident_manager.current for a in i.actions][-1:] == ["refused"]
    assert trouble.limits == [(0, 500.0)]
    agent.clock.advance(100)
    settle(agent, State.RESOLVED)
    assert trouble.limits == [(0, 500.0)] * 2


def test_listeners_hear_of_every_change(tmp_path: Path, trouble: Trouble) -> None:
    """Opened, verifying and resolved are announced; acting is the agent's own doing and is not."""
    heard: list[State] = []
    agent = trouble.agent(tmp_path, listeners=[lambda _incident, transition: heard.append(transition.after)])
    trouble.on = True
    settle(agent, State.RESOLVED)
    assert heard == [State.OPEN, State.VERIFYING, State.RESOLVED]


def test_ticks_lie_on_a_grid_and_those_missed_are_counted(tmp_path: Path) -> None:
    """A tick that takes two and a half intervals costs two; the grid begins with the second look after a moment."""
    agent = Agent(tmp_path, [], [], interval_s=1.0)
    times: list[float] = []

    class Waiter(threading.Event):
        """Lets the time that is waited for pass."""

        def wait(self, timeout: float | None = None) -> bool:
            agent.clock.advance(timeout or 0.0)
            return self.is_set()

    stop = Waiter()

    def after() -> None:
        times.append(agent.clock.now - 1000.0)
        if len(times) == 3:
            agent.clock.advance(2.5)
        if len(times) == 5:
            stop.set()

    agent.loop.run(stop, after)
    assert times == pytest.approx([0.0, 0.1, 1.1, 4.1, 5.1])
    assert agent.metrics()["opsd_agent_missed_ticks_total{}"] == 2
