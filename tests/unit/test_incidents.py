"""The life of an incident, whatever is found, healed and done in whatever order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.agent import incidents, lifecycle
from opsd.agent.incidents import IncidentTable, cost_growth, reduce, settled_by, shifted
from opsd.agent.lifecycle import IncidentRules, Observed, Outcome
from opsd.runbooks.base import Cost, Culprit, Evidence, Finding, Incident, Severity, State
from tests.fakes.incidents import RULES, T0, WALL, Timeline, finding, throttled

# The life of an incident, whatever is found, healed and done in whatever order.


def test_a_finding_opens_one_incident_however_often_it_is_found() -> None:
    """The same kind and key is the same incident; another key is another one."""
    timeline = Timeline()
    for _ in range(5):
        timeline.tick(throttled(), throttled("gpu1"))
    assert len(timeline.table.incidents) == 2
    assert [t.after for t in timeline.transitions] == [State.OPEN, State.OPEN]


def test_an_incident_opens_only_once_it_was_found_for_long_enough() -> None:
    """A shorter finding leaves no trace, and a gap of two ticks does not restart the time."""
    timeline = Timeline({"throttle": IncidentRules(open_after_s=5)})
    timeline.tick(throttled())
    for _ in range(5):
        timeline.tick()
    assert not timeline.table.pending
    for found in ([throttled()], [], [throttled()], [throttled()], [throttled()], [throttled()]):
        assert not timeline.table.incidents
        timeline.tick(*found)
    assert timeline.incident.state is State.OPEN


def test_a_remedy_that_helps_resolves_the_incident() -> None:
    """open, acting, verifying, resolved; and what was done stands in the incident."""
    timeline = Timeline()
    timeline.tick(throttled())
    timeline.act()
    assert timeline.incident.state is State.ACTING
    timeline.tick(throttled(), healed=True, outcomes=[timeline.outcome()])
    assert timeline.incident.state is State.VERIFYING
    for _ in range(4):
        timeline.tick(healed=True)
    (resolved,) = timeline.ended
    assert (resolved.state, resolved.attempts, resolved.resolved_at) == (State.RESOLVED, 1, T0 + 5)
    assert [(a["outcome"], a["detail"]) for a in resolved.actions] == [("ok", "done")]
    assert not timeline.table.incidents


def test_a_remedy_that_does_not_help_is_tried_again_and_then_escalated() -> None:
    """After max_attempts an incident is a person's; it stays current and opens no second one."""
    timeline = Timeline()
    timeline.tick(throttled())
    for attempt in (0, 1):
        timeline.act()
        timeline.tick(throttled(), healed=False, outcomes=[timeline.outcome(number=attempt)])
        for _ in range(11):
            timeline.tick(throttled(), healed=False)
    assert timeline.incident.state is State.ESCALATED
    assert timeline.incident.verdict == "not over 10 s after 2 attempts"
    assert [t.after for t in timeline.transitions].count(State.OPEN) == 2


def test_an_escalated_incident_is_over_once_healed_but_stays_escalated() -> None:
    """That opsd could not help is part of the record; the next occurrence is a new incident."""
    timeline = Timeline({"throttle": IncidentRules(verify_s=2)})
    timeline.tick(throttled())
    first = timeline.incident.id
    for _ in range(4):
        timeline.tick(throttled(), healed=False, idle=True)
    assert timeline.incident.state is State.ESCALATED
    for _ in range(7):
        timeline.tick(healed=True)
    assert [(i.state, i.resolved_at is None) for i in timeline.ended] == [(State.ESCALATED, False)]
    assert [t.after for t in timeline.transitions] == [State.OPEN, State.ESCALATED, State.ESCALATED]
    assert timeline.transitions[-1].text == "not over after 2 s; over later"
    timeline.tick(throttled())
    assert timeline.incident.id != first


def test_a_failed_action_is_tried_again_without_waiting_for_an_effect() -> None:
    """What was not done cannot help; the last attempt's failure is left to verification, as it may heal by itself."""
    timeline = Timeline()
    timeline.tick(throttled())
    timeline.act()
    timeline.tick(throttled(), healed=False, outcomes=[timeline.outcome(ok=False)])
    assert (timeline.incident.state, timeline.incident.verdict) == (State.OPEN, "attempt 1 failed: no permission")
    timeline.act()
    timeline.tick(throttled(), healed=False, outcomes=[timeline.outcome(ok=False, number=1)])
    assert timeline.incident.state is State.VERIFYING


def test_verification_begins_when_the_last_action_has_ended() -> None:
    """An attempt of two actions is acting until both outcomes are in."""
    timeline = Timeline()
    timeline.tick(throttled())
    running = {"target": "gpu0", "outcome": "running", "detail": ""}
    timeline.act({"verb": "set_power_limit", **running}, {"verb": "notify", **running})
    timeline.tick(outcomes=[timeline.outcome(number=1)])
    assert timeline.incident.state is State.ACTING
    timeline.tick(outcomes=[timeline.outcome(number=0)])
    assert timeline.incident.state is State.VERIFYING


def test_what_cannot_be_judged_is_given_up_after_an_hour_and_not_called_resolved() -> None:
    """A run that has vanished leaves no incident behind for ever, and no false good news either."""
    timeline = Timeline()
    timeline.tick(throttled())
    timeline.tick(healed=None, seconds=lifecycle.GIVE_UP_S - 10)
    assert timeline.incident.state is State.OPEN
    timeline.tick(healed=None, seconds=20)
    (ended,) = timeline.ended
    assert ended.state is State.ESCALATED
    assert "nothing is known" in ended.verdict


@pytest.mark.parametrize("healed", [None, False])
def test_what_can_no_longer_be_seen_ends_as_unproven(healed: bool | None) -> None:
    """It is not escalated meanwhile, and a person who had been called hears that it is over."""
    timeline = Timeline()
    timeline.tick(throttled(run="smol"))
    timeline.act()
    timeline.tick(outcomes=[timeline.outcome()])
    ended_at = timeline.now
    timeline.tick(healed=healed, seconds=lifecycle.UNPROVEN_S - 1, over_since=ended_at)
    assert timeline.incident.state is State.VERIFYING
    timeline.tick(healed=healed, seconds=1, over_since=ended_at)
    (ended,) = timeline.ended
    assert (ended.state, ended.resolved_at) == (State.UNPROVEN, timeline.now)
    assert ended.verdict == "unproven: run smol has ended on this node, so nobody can see whether it is over"
    for number in (0, 1):
        timeline.tick(throttled())
        timeline.act()
        timeline.tick(throttled(), outcomes=[timeline.outcome(number=number)])
        timeline.tick(throttled(), seconds=11)
    assert timeline.incident.state is State.ESCALATED
    timeline.tick(healed=healed, seconds=lifecycle.UNPROVEN_S, over_since=timeline.now)
    assert timeline.ended[-1].state is State.ESCALATED


WORSE = [{"severity": Severity.CRITICAL}, {"gravity": 5}]


@pytest.mark.parametrize("changes", WORSE)
@pytest.mark.parametrize("state", [State.OPEN, State.ACTING, State.VERIFYING, State.ESCALATED])
def test_what_gets_worse_is_answered_anew_in_every_state(state: State, changes: dict[str, object]) -> None:
    """It is told once, with the new culprit; actions under way end first. What falls again is not told."""
    timeline = Timeline()
    mild, grave = throttled(gravity=2), throttled(gravity=3, confidence=0.5, summary="GPU 0 is lost")
    grave = replace(grave, **changes)
    timeline.tick(mild)
    if state is not State.OPEN:
        timeline.act()
    if state in (State.VERIFYING, State.ESCALATED):
        timeline.tick(mild, outcomes=[timeline.outcome()])
    if state is State.ESCALATED:
        timeline.tick(mild, seconds=11)
        timeline.act()
        timeline.tick(mild, outcomes=[timeline.outcome(number=1)])
        timeline.tick(mild, seconds=11)
    assert timeline.incident.state is state
    before = len(timeline.transitions)
    for _ in (1, 2):
        timeline.tick(grave)
    timeline.tick(mild)
    after = timeline.incident
    assert [t.text for t in timeline.transitions[before:] if t.worse] == ["worse: GPU 0 is lost"]
    if state is State.ACTING:
        assert (after.state, after.attempts) == (State.ACTING, 1)
        timeline.tick(grave, outcomes=[timeline.outcome()])
        after = timeline.incident
    assert (after.state, after.attempts, after.severity) == (State.OPEN, 0, grave.severity)
    assert after.gravity == grave.gravity


def test_cost_accumulates_over_the_life_of_the_incident() -> None:
    """GPU-seconds never shrink, and grow with the share lost where the finding says how many GPUs pay."""
    timeline = Timeline()
    timeline.tick(throttled(cost=Cost(0.5, 100.0)))
    timeline.tick(throttled(cost=Cost(0.25, 40.0)))
    assert (timeline.incident.cost.gpu_seconds, timeline.incident.cost.throughput_ratio) == (100.0, 0.25)
    for _ in range(10):
        timeline.tick(throttled(cost=Cost(0.25, 40.0, gpus=8)))
    assert timeline.incident.cost.gpu_seconds == pytest.approx(100 + 10 * 0.25 * 8)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e4), st.booleans()), min_size=1, max_size=40))
def test_each_second_lost_is_counted_once(life: list[tuple[bool, float, bool]]) -> None:
    """Over its end and its return the growth adds up to the cost of the incident, less what grew while a symptom."""
    timeline, counted, while_symptom = Timeline(), 0.0, 0.0
    for found, seconds, symptom in life:
        before = timeline.table
        timeline.tick(*[throttled(cost=Cost(0.5, seconds, gpus=2))] * found, healed=not found)
        linked = {n: replace(i, cause="x" if symptom else None) for n, i in timeline.table.incidents.items()}
        timeline.table = replace(timeline.table, incidents=linked)
        counted += sum(grown for _, grown in cost_growth(before, timeline.table))
        apart = replace(timeline.table, incidents={n: replace(i, cause=None) for n, i in linked.items()})
        while_symptom += symptom * sum(grown for _, grown in cost_growth(before, apart))
    ids = {i.id: i.cost.gpu_seconds for i in (*timeline.ended, *timeline.table.incidents.values())}
    assert counted + while_symptom == pytest.approx(sum(ids.values()))


def test_a_surer_finding_corrects_the_culprit_and_a_less_sure_one_does_not() -> None:
    """Severity only grows, and the diagnosis is the surest so far."""
    timeline = Timeline()
    timeline.tick(throttled())
    timeline.tick(throttled(culprit=Culprit("data"), confidence=0.9, severity=Severity.CRITICAL))
    timeline.tick(throttled(culprit=Culprit("network"), confidence=0.3, severity=Severity.INFO))
    assert (timeline.incident.culprit, timeline.incident.confidence) == (Culprit("data"), 0.9)
    assert timeline.incident.severity is Severity.CRITICAL


def test_evidence_is_what_was_found_first_and_what_is_found_now() -> None:
    """A sentence whose number changes every second does not pile up."""
    timeline = Timeline()
    for number in range(100):
        timeline.tick(throttled(evidence=(Evidence(f"reading {number}", "nvml", timeline.now + 1),)))
    assert [evidence.text for evidence in timeline.incident.evidence] == ["reading 0", "reading 99"]


def test_evidence_is_bounded() -> None:
    """A thousand sentences leave room for both the first and the newest."""
    timeline = Timeline()
    for number in range(3):
        texts = [f"{number} {line}" for line in range(1000)]
        timeline.tick(throttled(evidence=tuple(Evidence(text, "log", timeline.now + 1) for text in texts)))
    found = [evidence.text for evidence in timeline.incident.evidence]
    assert len(found) == lifecycle.MAX_EVIDENCE
    assert {text.split()[0] for text in found} == {"0", "2"}


def test_evidence_that_reads_the_same_is_fresh_each_time() -> None:
    """The policy acts on fresh evidence only, so a trouble that goes on must not look old."""
    timeline = Timeline()
    for _ in range(10):
        timeline.tick(throttled(evidence=(Evidence("too hot", "nvml", timeline.now + 1),)))
    (evidence,) = timeline.incident.evidence
    assert (evidence.at, evidence.newest) == (timeline.incident.opened_at, timeline.now)
    timeline.tick(throttled(evidence=(Evidence("cooler", "nvml", timeline.now + 1),)))
    assert [evidence.text for evidence in timeline.incident.evidence] == ["too hot", "cooler"]


def test_a_recommendation_is_noted_once() -> None:
    """The same advice every second is one line, and the notes are bounded."""
    timeline = Timeline()
    timeline.tick(throttled())
    note = {"verb": "kill_process", "target": "r0", "outcome": "recommended", "detail": ""}
    incident = lifecycle.noted(lifecycle.noted(timeline.incident, [note]), [note])
    assert len(incident.actions) == 1
    many = [{**note, "target": str(i)} for i in range(200)]
    assert len(lifecycle.noted(incident, many).actions) == lifecycle.MAX_ACTIONS


ticks = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["gpu0", "gpu1"]), unique=True),
        st.sampled_from([True, False, None]),
        st.sampled_from(["nothing", "act", "succeed", "fail", "idle"]),
        st.sampled_from([0.5, 1.0, 3.0, 12.0]),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(ticks)
def test_invariants_hold_in_every_history(history) -> None:
    """Ids are unique, one incident per key, final states stay, nothing resolves without having been healed for long."""
    now, table, ids, final = T0, IncidentTable(), set(), {}
    healed_since: dict[str, float | None] = {}
    for keys, healed, doing, seconds in history:
        now += seconds
        before = table
        current = {i.id: i for i in before.incidents.values()}
        outcomes = [
            Outcome(i.id, len(i.actions) - 1, doing == "succeed", "x")
            for i in current.values()
            if i.state is State.ACTING and doing in ("succeed", "fail")
        ]
        for id in current:
            since = healed_since.get(id)
            healed_since[id] = (now if since is None else since) if healed is True else None
        idle = frozenset(current) if doing == "idle" else frozenset()
        observed = Observed([throttled(key) for key in keys], dict.fromkeys(current, healed), idle, outcomes)
        table, ended, transitions = reduce(before, observed, RULES, now)
        for transition in transitions:
            if transition.before is None:
                assert transition.incident not in ids
                ids.add(transition.incident)
        for incident in (*table.incidents.values(), *ended):
            assert final.get(incident.id, incident.state) is incident.state
            assert incident.attempts <= RULES["throttle"].max_attempts
            if incident.state in (State.RESOLVED, State.ESCALATED):
                final[incident.id] = incident.state
            if incident.state is State.RESOLVED:
                since = healed_since[incident.id]
                assert since is not None
                assert now - since >= RULES["throttle"].clear_after_s
        assert all(i.resolved_at is not None for i in ended)
        assert all(i.resolved_at is None for i in table.incidents.values())
        if doing == "act":
            record = {"verb": "v", "target": "t", "outcome": "running", "detail": ""}
            acted = {
                name: lifecycle.started(i, [record], now)
                if i.state is State.OPEN and i.attempts < RULES["throttle"].max_attempts
                else i
                for name, i in table.incidents.items()
            }
            table = replace(table, incidents=acted)


# Incidents across restarts of the agent and steps of the wall clock.


def test_an_action_under_way_at_a_restart_is_under_way_still() -> None:
    """It is carried out or given up, and either has an outcome."""
    timeline = Timeline()
    timeline.tick(throttled())
    timeline.act()
    loaded = lifecycle.resumed(timeline.incident, timeline.now + 60)
    assert (loaded.state, loaded.attempts) == (State.ACTING, 1)
    assert [number for number, _ in lifecycle.unfinished(loaded)] == [0]


def test_an_attempt_without_an_action_under_way_is_verified() -> None:
    """No outcome would ever end it."""
    timeline = Timeline()
    timeline.tick(throttled())
    timeline.act({"verb": "notify", "outcome": "ok"})
    loaded = lifecycle.resumed(timeline.incident, timeline.now + 60)
    assert (loaded.state, loaded.acted_at) == (State.VERIFYING, timeline.now + 60)


def test_a_step_of_the_clock_does_not_cut_a_hold_time_short() -> None:
    """An hour's jump neither resolves nor escalates."""
    timeline = Timeline()
    timeline.tick(throttled())
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
        timeline.tick(throttled())
        timeline.table = incidents.shifted(timeline.table, step)
        timeline.now += step
    unseen.tick()
    assert unseen.incident.state is State.OPEN
    idle.tick(throttled(), healed=False, idle=True)
    assert idle.incident.state is State.OPEN
    idle.tick(throttled(), healed=False, idle=True, seconds=RULES["throttle"].verify_s)
    assert idle.incident.state is State.ESCALATED


@pytest.mark.parametrize("step", [3600, -3600])
def test_a_step_of_the_clock_does_not_change_how_long_something_may_come_back(step: float) -> None:
    """What was over a second ago is the same incident, whatever the clock says now."""
    timeline = Timeline(rules={"throttle": IncidentRules(clear_after_s=0, hold_s=60)})
    timeline.tick(throttled())
    first = timeline.incident.id
    timeline.tick(healed=True)
    timeline.table = incidents.shifted(timeline.table, step)
    timeline.now += step
    timeline.tick(throttled())
    assert timeline.incident.id == first
    timeline.tick(healed=True)
    timeline.tick(throttled(), seconds=61)
    assert timeline.incident.id != first


@pytest.mark.parametrize("state", [State.OPEN, State.VERIFYING])
def test_the_time_in_which_no_agent_watched_ends_no_wait(state: State) -> None:
    """After hours of repair the collectors need some seconds before anything is known: nobody is called for those."""
    timeline = Timeline()
    timeline.tick(throttled())
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
    timeline.tick(throttled())
    timeline.tick(healed=True)
    name, before = next(iter(timeline.table.incidents.items()))
    timeline.now += 3600
    timeline.table = IncidentTable({name: lifecycle.resumed(before, timeline.now)}, watching_since=timeline.now)
    timeline.tick(healed=True)
    assert timeline.incident.state is State.OPEN


# Trouble that comes and goes is one incident, and a person's in the end.


CLEAR_S, HOLD_S, RELAPSES = 2.0, 60.0, 3

FLAPPING_RULES = {"trouble": IncidentRules(clear_after_s=CLEAR_S, hold_s=HOLD_S, max_relapses=RELAPSES)}


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
            self.table, ended, transitions = reduce(self.table, observed, FLAPPING_RULES, self.now)
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
            table, ended, transitions = reduce(table, observed, FLAPPING_RULES, course.now + second)
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


# One piece of evidence opens one incident, and what was true at its time is not taken back.


EVIDENCE_RULES = {"gpu_xid": IncidentRules(clear_after_s=2.0)}

XID = Finding(
    kind="gpu_xid",
    key="GPU-0001",
    severity=Severity.WARNING,
    summary="GPU 1: Xid 94",
    culprit=Culprit("gpu", "n01", 1, 5, "Xid 94"),
    confidence=0.9,
    evidence=(Evidence("Xid 94", "kmsg", 100.0),),
    job="4242",
    run="smol",
    struck_at=100.0,
)


def ended_book():
    """A table whose only incident was healed."""
    table, _, _ = reduce(IncidentTable(), Observed([XID]), EVIDENCE_RULES, 101.0)
    (incident,) = table.incidents.values()
    for now in (102.0, 103.0, 104.0):
        table, ended, _ = reduce(table, Observed(healed={incident.id: True}), EVIDENCE_RULES, now)
        if ended:
            return table, ended
    raise AssertionError("the incident did not end")


@pytest.mark.parametrize("step", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("jitter", [0.0, 6e-5, 2.0])
def test_evidence_of_an_ended_incident_opens_no_second_one(step, jitter):
    """The proof of health can vanish with the run; a step of the clock, and a time told again, change nothing."""
    table, _ = ended_book()
    table = shifted(table, step)
    late = replace(XID, struck_at=100.0 + step + jitter, culprit=Culprit("gpu", "n01", 1), job="")
    after, _, transitions = reduce(table, Observed([late]), EVIDENCE_RULES, 200.0 + step)
    assert not after.incidents
    assert transitions == ()


def test_a_newer_event_opens_an_incident():
    """Only what was settled is left alone."""
    table, _ = ended_book()
    _, _, transitions = reduce(table, Observed([replace(XID, struck_at=150.0)]), EVIDENCE_RULES, 150.5)
    assert [transition.before for transition in transitions] == [None]


def test_a_condition_that_lasts_opens_an_incident_again():
    """The driver can ask for a recovery after the Xid was healed."""
    table, _ = ended_book()
    _, _, transitions = reduce(table, Observed([replace(XID, struck_at=None)]), EVIDENCE_RULES, 150.0)
    assert len(transitions) == 1


def test_an_agent_that_starts_knows_what_was_settled():
    """The journal has the ended incidents; one of a clock that was ahead settles nothing that is to come."""
    _, ended = ended_book()
    assert settled_by(ended, 1000.0) == {("gpu_xid", "GPU-0001"): 100.0}
    assert settled_by([replace(ended[0], struck_at=5000.0)], 1000.0) == {("gpu_xid", "GPU-0001"): 1000.0}
    assert settled_by(ended, 100.0 + incidents.SETTLED_S) == {}


@pytest.mark.parametrize(
    ("rank", "job", "run"),
    [(None, "", ""), (2, "4243", "next")],
    ids=["the rank is gone", "another job has the GPU"],
)
def test_rank_job_and_run_are_those_at_the_time_of_the_evidence(rank, job, run):
    """The same Xid, judged while its rank is restarted or when another job has the GPU, blames the first one."""
    first = lifecycle.opened(XID, 101.0)
    later = replace(XID, culprit=Culprit("gpu", "n01", 1, rank, "Xid 94"), job=job, run=run)
    after = lifecycle.merged(first, later, 110.0)
    assert (after.culprit.rank, after.job, after.run) == (5, "4242", "smol")
