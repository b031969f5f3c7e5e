"""Trouble that comes and goes is one incident, and a person's in the end."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from opsd.agent.incidents import IncidentTable, reduce
from opsd.agent.lifecycle import IncidentRules, Observed
from opsd.runbooks.base import Incident, State
from tests.fakes.incidents import WALL, finding

CLEAR_S, HOLD_S, RELAPSES = 2.0, 60.0, 3
RULES = {"trouble": IncidentRules(clear_after_s=CLEAR_S, hold_s=HOLD_S, max_relapses=RELAPSES)}


class Course:
    """Plays seconds in which the trouble is there or not, and remembers what ended and what changed."""

    def __init__(self) -> None:
        self.table, self.now = IncidentTable(), WALL
        self.ended: list[Incident] = []
        self.states: list[tuple[State | None, State]] = []

    def play(self, trouble: bool, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now += 1
            healed = {incident.id: not trouble for incident in self.table.incidents.values()}
            observed = Observed([finding()] if trouble else [], healed)
            self.table, ended, transitions = reduce(self.table, observed, RULES, self.now)
            self.ended += ended
            self.states += [(t.before, t.after) for t in transitions]

    @property
    def incident(self) -> Incident:
        (incident,) = self.table.incidents.values()
        return incident


def test_what_comes_back_within_the_hold_time_goes_on_as_the_same_incident() -> None:
    """It keeps its id and its beginning, and counts."""
    course = Course()
    course.play(True)
    first = course.incident
    course.play(False, 10)
    assert not course.table.incidents
    course.play(True)
    back = course.incident
    assert (back.id, back.opened_at, back.relapses, back.resolved_at) == (first.id, first.opened_at, 1, None)
    assert course.states == [(None, State.OPEN), (State.OPEN, State.RESOLVED), (State.RESOLVED, State.OPEN)]


def test_what_comes_back_later_is_another_incident() -> None:
    """After the hold time the old one is history."""
    course = Course()
    course.play(True)
    first = course.incident
    course.play(False, int(CLEAR_S + HOLD_S) + 2)
    course.play(True)
    assert course.incident.id != first.id
    assert course.incident.relapses == 0


def test_it_escalates_after_some_relapses_instead_of_resolving_again() -> None:
    """It stays with the person from then on, also when it is over once more."""
    course = Course()
    for _ in range(RELAPSES + 2):
        course.play(True, 2)
        course.play(False, 10)
    assert course.states.count((State.OPEN, State.RESOLVED)) == RELAPSES
    assert course.ended[-1].state is State.ESCALATED
    assert "came back within 60 s, 4 times so far" in course.ended[-1].verdict


def test_a_relapse_does_not_pay_for_the_time_in_between() -> None:
    """Costs grow while the trouble is there only."""
    course = Course()
    course.play(True)
    before = course.incident.cost.gpu_seconds
    course.play(False, 30)
    course.play(True)
    assert course.incident.cost.gpu_seconds == before


def test_a_held_symptom_neither_ends_nor_escalates() -> None:
    """Whatever it is found to be, it waits for its cause."""
    course = Course()
    course.play(True)
    name, incident = next(iter(course.table.incidents.items()))
    for state in (State.OPEN, State.VERIFYING, State.ESCALATED):
        table = IncidentTable({name: replace(incident, state=state, acted_at=WALL)})
        observed = Observed(healed={incident.id: True}, held=frozenset({incident.id}), idle=frozenset({incident.id}))
        for second in range(0, 1000, 100):
            table, ended, transitions = reduce(table, observed, RULES, course.now + second)
            assert (ended, transitions) == ((), ())


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=30))
def test_however_it_flaps_people_hear_of_one_incident_a_bounded_number_of_times(course_of: list[tuple[bool, int]]):
    """Ids differ only across gaps longer than the hold time, and none is resolved more often than it may relapse."""
    course = Course()
    for trouble, seconds in course_of:
        course.play(trouble, seconds)
    seen = [*course.ended, *course.table.incidents.values()]
    for id in {incident.id for incident in seen}:
        lives = [incident for incident in seen if incident.id == id]
        assert [incident.relapses for incident in lives] == list(range(len(lives)))
        assert sum(incident.state is State.RESOLVED for incident in lives) <= RELAPSES
        assert all(incident.state is State.ESCALATED for incident in lives[RELAPSES:])
    for old, new in zip(course.ended, seen[1:], strict=False):
        assert old.resolved_at is not None
        began = new.opened_at if new.reopened_at is None else new.reopened_at
        assert (new.id == old.id) == (began - old.resolved_at < HOLD_S)
