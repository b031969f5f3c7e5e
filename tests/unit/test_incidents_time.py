"""Incidents across restarts of the agent and steps of the wall clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opsd.agent import incidents, lifecycle
from opsd.agent.incidents import IncidentTable
from opsd.agent.lifecycle import IncidentRules
from opsd.runbooks.base import State
from tests.fakes.timeline import RULES, Timeline, finding


def test_an_action_under_way_at_a_restart_is_under_way_still() -> None:
    """It is carried out or given up, and either has an outcome."""
    timeline = Timeline()
    timeline.tick(finding())
    timeline.act()
    loaded = lifecycle.resumed(timeline.incident, timeline.now + 60)
    assert (loaded.state, loaded.attempts) == (State.ACTING, 1)
    assert [number for number, _ in lifecycle.unfinished(loaded)] == [0]


def test_an_attempt_without_an_action_under_way_is_verified() -> None:
    """No outcome would ever end it."""
    timeline = Timeline()
    timeline.tick(finding())
    timeline.act({"verb": "notify", "outcome": "ok"})
    loaded = lifecycle.resumed(timeline.incident, timeline.now + 60)
    assert (loaded.state, loaded.acted_at) == (State.VERIFYING, timeline.now + 60)


def test_a_step_of_the_clock_does_not_cut_a_hold_time_short() -> None:
    """An hour's jump neither resolves nor escalates."""
    timeline = Timeline()
    timeline.tick(finding())
    timeline.tick(healed=True)
    timeline.table = incidents.shifted(timeline.table, 3600)
    timeline.now += 3600
    timeline.tick(healed=True)
    assert timeline.incident.state is State.OPEN


@pytest.mark.parametrize("step", [2 * lifecycle.GIVE_UP_S, -2 * lifecycle.GIVE_UP_S])
def test_a_step_of_the_clock_ends_no_wait_and_restarts_none(step: float) -> None:
    """Neither what is unseen nor what nobody can help is a person's turn at once, or hours too late."""
    unseen, idle = Timeline(), Timeline()
    for timeline in (unseen, idle):
        timeline.tick(finding())
        timeline.table = incidents.shifted(timeline.table, step)
        timeline.now += step
    unseen.tick()
    assert unseen.incident.state is State.OPEN
    idle.tick(finding(), healed=False, idle=True)
    assert idle.incident.state is State.OPEN
    idle.tick(finding(), healed=False, idle=True, seconds=RULES["throttle"].verify_s)
    assert idle.incident.state is State.ESCALATED


@pytest.mark.parametrize("step", [3600, -3600])
def test_a_step_of_the_clock_does_not_change_how_long_something_may_come_back(step: float) -> None:
    """What was over a second ago is the same incident, whatever the clock says now."""
    timeline = Timeline(rules={"throttle": IncidentRules(clear_after_s=0, hold_s=60)})
    timeline.tick(finding())
    first = timeline.incident.id
    timeline.tick(healed=True)
    timeline.table = incidents.shifted(timeline.table, step)
    timeline.now += step
    timeline.tick(finding())
    assert timeline.incident.id == first
    timeline.tick(healed=True)
    timeline.tick(finding(), seconds=61)
    assert timeline.incident.id != first


@pytest.mark.parametrize("state", [State.OPEN, State.VERIFYING])
def test_the_time_in_which_no_agent_watched_ends_no_wait(state: State) -> None:
    """After hours of repair the collectors need some seconds before anything is known: nobody is called for those."""
    timeline = Timeline()
    timeline.tick(finding())
    name, before = next(iter(timeline.table.incidents.items()))
    before = replace(before, state=state, acted_at=timeline.now if state is State.VERIFYING else None)
    timeline.now += 2 * lifecycle.GIVE_UP_S
    timeline.table = IncidentTable({name: lifecycle.resumed(before, timeline.now)}, watching_since=timeline.now)
    timeline.tick(idle=True)
    assert timeline.incident.state is state
    timeline.tick(healed=True)
    timeline.tick(healed=True, seconds=RULES["throttle"].clear_after_s)
    assert timeline.ended[0].state is State.RESOLVED


def test_health_seen_by_an_earlier_agent_does_not_count() -> None:
    """Nobody knows whether it stayed healthy meanwhile."""
    timeline = Timeline()
    timeline.tick(finding())
    timeline.tick(healed=True)
    name, before = next(iter(timeline.table.incidents.items()))
    timeline.now += 3600
    timeline.table = IncidentTable({name: lifecycle.resumed(before, timeline.now)}, watching_since=timeline.now)
    timeline.tick(healed=True)
    assert timeline.incident.state is State.OPEN
