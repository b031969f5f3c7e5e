"""No action without a durable intention, and none that was begun is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.agent import lifecycle
from opsd.agent.incident_manager import why_not
from opsd.agent.lifecycle import Outcome
from opsd.agent.policy import PastAction
from opsd.runbooks.base import Action, Evidence, Incident, Runbook, State, View
from opsd.settings.policy import PolicySettings
from tests.fakes.clock import FakeClock, until
from tests.fakes.collectors import Agent, FakeCollector, runbook
from tests.fakes.incidents import WALL, finding, incident
from tests.fakes.process import stuck_agent

LOWER = Action("set_power_limit", "gpu0", {"gpu": 0, "watts": 500}, "too hot")
KILL = Action("kill_process", "r", {"run": "r", "rank": 0, "pid": 7}, "hangs")
TELL = Action("notify", "node", {"text": "look"}, "look")


class Node:
    """A node in trouble. ``wait`` blocks each change of the power limit while it is cleared."""

    def __init__(self, folder: Path, remedy: tuple[Action, ...] = (LOWER,)) -> None:
        self.folder, self.remedy = folder, remedy
        self.clock = FakeClock()
        self.limits: list[float] = []
        self.trouble = True
        self.wait = threading.Event()
        self.wait.set()
        self.begun = threading.Event()

    def agent(self, **changes: object) -> Agent:
        book = runbook(detect=self._detect, remedy=lambda _incident, _view: self.remedy, healed=lambda _i, _v: False)
        books: list[Runbook] = [book]
        source = [FakeCollector("source")]
        return Agent(self.folder, source, books, set_power_limit=self._lower, clock=self.clock, **changes)

    def _detect(self, view: View) -> Iterator[object]:
        if self.trouble:
            yield finding(evidence=(Evidence("too hot", "nvml", view.wall),))

    def _lower(self, _gpu: int, watts: float) -> None:
        wait = self.wait
        self.begun.set()
        wait.wait(20)
        self.limits.append(watts)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "state")


@contextmanager
def killed_while_acting(node: Node, **changes: object) -> Iterator[None]:
    """An agent that ended after its intention was written and before the action was over."""
    node.wait.clear()
    first = node.agent(**changes)
    first.tick()
    assert first.journal.flush(20)
    assert node.begun.wait(20)
    first.journal.close(20)
    held, node.limits, node.wait = node.wait, [], threading.Event()
    node.wait.set()
    yield
    held.set()


def outcomes(agent: Agent) -> list[tuple[str, str]]:
    """Outcome and detail of each action of the only incident, once none is under way."""

    def over() -> Incident | None:
        agent.tick()
        (incident,) = agent.incident_manager.current
        return None if any(action["outcome"] == "running" for action in incident.actions) else incident

    settled = until(over)
    assert settled is not None
    return [(str(action["outcome"]), str(action["detail"])) for action in settled.actions]


def test_without_a_journal_nothing_is_done(node: Node) -> None:
    """The incident says why; once the disk is back the action is carried out."""
    node.folder.write_text("in the way")
    agent = node.agent()
    agent.tick(3)
    (incident,) = agent.incident_manager.current
    ((outcome, detail),) = [(str(a["outcome"]), str(a["detail"])) for a in incident.actions]
    assert (outcome, incident.state, node.limits) == ("refused", State.OPEN, [])
    assert detail.startswith("nothing would remember it: ")
    node.folder.unlink()
    assert agent.journal.flush(20)
    assert ("ok", "power limit of GPU 0 set to 500 W") in outcomes(agent)
    assert node.limits == [500.0]


def test_an_action_whose_intention_was_not_written_in_time_was_no_attempt() -> None:
    """Or nothing would be done about the only incident of its kind once the disk has room again."""
    settled = lifecycle.settled(
        incident(state=State.ACTING, attempts=1, actions=({"outcome": "running"},)),
        [Outcome("trouble-1", 0, ok=False, detail="no journal", refused=True, put_off=True)],
        lifecycle.IncidentRules(max_attempts=1),
        WALL,
    )
    assert (settled.state, settled.attempts, settled.verdict) == (State.OPEN, 0, "put off: no journal")


def test_people_are_told_without_a_journal(node: Node) -> None:
    """A notification changes nothing on the node."""
    node.remedy = (TELL,)
    node.folder.write_text("in the way")
    agent = node.agent()
    assert outcomes(agent)[0] == ("ok", "told")
    assert agent.told[0] == "look"


def test_an_action_cut_off_by_the_end_of_the_agent_is_carried_out(node: Node) -> None:
    """Once, and it stays one attempt."""
    with killed_while_acting(node):
        agent = node.agent()
        assert outcomes(agent) == [("ok", "power limit of GPU 0 set to 500 W")]
        assert [i.attempts for i in agent.incident_manager.current] == [1]
    assert node.limits[0] == 500.0


@pytest.mark.parametrize(
    ("mode", "limits", "away_s", "why"),
    [
        ("recommend", PolicySettings(cooldown_s=0), 5, "policy mode is now recommend"),
        ("act", PolicySettings(cooldown_s=0), 1000, "it was begun more than 15 minutes ago"),
        ("act", PolicySettings(cooldown_s=0), -1000, "it was begun more than 15 minutes ago"),
    ],
)
def test_what_is_no_longer_to_be_done_is_given_up_in_words(
    node: Node, mode: str, limits: PolicySettings, away_s: float, why: str
) -> None:
    """After a change of the policy, or where nobody can tell what has become of the fault."""
    with killed_while_acting(node):
        node.clock.advance(away_s)
        agent = node.agent(mode=mode, limits=limits)
        assert outcomes(agent)[0] == ("failed", f"given up after a restart of the agent: {why}")
        assert node.limits == [] or mode == "act"


def test_hardware_is_changed_only_for_a_reason_that_still_holds(node: Node) -> None:
    """Kernel or driver must give it again; where they do not within half a minute, the action is given up."""
    with killed_while_acting(node):
        node.trouble = False
        agent = node.agent()
        until(lambda: not agent.journal.problem)
        agent.tick(25)
        assert node.limits == []
        why = "given up after a restart of the agent: neither kernel nor driver gives a reason for it now"
        assert outcomes(agent)[0] == ("failed", why)
        assert node.limits == []


def test_an_action_that_ends_the_agent_is_not_carried_out_for_ever(node: Node) -> None:
    """A driver may take the agent down with it; the second time it is given up."""
    with killed_while_acting(node):
        node.wait.clear()
        second = node.agent()
        second.tick()
        assert second.journal.flush(20)
        second.journal.close(20)
        agent = node.agent(mode="recommend")
        why = "given up after a restart of the agent: the agent has ended twice while this was under way"
        assert outcomes(agent)[0] == ("failed", why)


def test_a_signal_is_not_sent_twice() -> None:
    """By then the number may be that of another process."""
    record = {"verb": "kill_process", "at": WALL}
    assert why_not("trouble", record, PolicySettings(mode="act"), WALL + 5) == "doing it twice could do harm"
    assert why_not("trouble", record | {"verb": "drain_node"}, PolicySettings(mode="act"), WALL + 5) == ""


def test_a_budget_that_was_read_late_counts(node: Node) -> None:
    """Another agent had the state folder when this one started."""
    other = node.agent()
    past = [PastAction("trouble", "kill_process", str(number), node.clock.wall()) for number in range(3)]
    for action in past:
        assert other.journal.action("a", action).wait(20)
    other.journal.close(20)
    with stuck_agent(node.folder):
        agent = node.agent(limits=PolicySettings(cooldown_s=0, max_actions_per_hour=3))
        agent.tick(2)
        assert node.limits == []
    until(lambda: not agent.journal.problem)
    agent.tick(3)
    (incident,) = agent.incident_manager.current
    assert [str(a["detail"]).partition(":")[0] for a in incident.actions] == [
        "nothing would remember it", "the limit of 3 actions an hour is reached"
    ]  # fmt: skip
    assert node.limits == []


def test_incidents_that_were_read_late_are_continued_or_ended(node: Node) -> None:
    """The one that was opened again meanwhile goes on under its new id; neither stays current twice."""
    other = node.agent()
    name = finding()
    same = replace(incident("old", kind=name.kind, key=name.key), actions=())
    for old in (same, incident("else", key="gpu7")):
        other.journal.incident(old)
    assert other.journal.flush(20)
    other.journal.close(20)
    with stuck_agent(node.folder):
        agent = node.agent(mode="observe")
        agent.tick(2)
        (new,) = agent.incident_manager.current
    until(lambda: not agent.journal.problem)
    agent.tick(2)
    assert {i.id for i in agent.incident_manager.current} == {new.id, "else"}
    assert [(i.id, i.verdict) for i in agent.incident_manager.ended] == [("old", f"continued as {new.id}")]
    agent.journal.close(20)
    assert {i.id for i in node.agent(mode="observe").incident_manager.current} == {new.id, "else"}


def test_times_to_come_begin_no_endless_wait(node: Node) -> None:
    """The clock was years ahead when the earlier agent wrote them."""
    first = node.agent(mode="observe")
    ahead = WALL + 1e9
    first.journal.incident(
        incident(
            "a", key="gpu0", opened_at=ahead, last_seen_at=ahead, acted_at=ahead, state=State.VERIFYING, attempts=1
        )
    )
    first.journal.close(20)
    agent = node.agent(mode="observe")
    agent.tick(100)
    assert [i.state for i in agent.incident_manager.current] == [State.OPEN]
