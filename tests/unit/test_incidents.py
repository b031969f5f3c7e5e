"""The life of an incident, whatever is found, healed and done in whatever order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.agent import lifecycle
from opsd.agent.incidents import IncidentTable, cost_growth, reduce
from opsd.agent.lifecycle import IncidentRules, Observed, Outcome
from opsd.runbooks.base import Cost, Culprit, Evidence, Severity, State
from tests.fakes.timeline import RULES, T0, Timeline, finding


def test_a_finding_opens_one_incident_however_often_it_is_found() -> None:
    """The same kind and key is the same incident; another key is another one."""
    timeline = Timeline()
    for _ in range(5):
        timeline.tick(finding(), finding("gpu1"))
    assert len(timeline.table.incidents) == 2
    assert [t.after for t in timeline.transitions] == [State.OPEN, State.OPEN]


def test_an_incident_opens_only_once_it_was_found_for_long_enough() -> None:
    """A shorter finding leaves no trace, and a gap of two ticks does not restart the time."""
    timeline = Timeline({"throttle": IncidentRules(open_after_s=5)})
    timeline.tick(finding())
    for _ in range(5):
        timeline.tick()
    assert not timeline.table.pending
    for found in ([finding()], [], [finding()], [finding()], [finding()], [finding()]):
        assert not timeline.table.incidents
        timeline.tick(*found)
    assert timeline.incident.state is State.OPEN


def test_a_remedy_that_helps_resolves_the_incident() -> None:
    """open, acting, verifying, resolved; and what was done stands in the incident."""
    timeline = Timeline()
    timeline.tick(finding())
    timeline.act()
    assert timeline.incident.state is State.ACTING
    timeline.tick(finding(), healed=True, outcomes=[timeline.outcome()])
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
    timeline.tick(finding())
    for attempt in (0, 1):
        timeline.act()
        timeline.tick(finding(), healed=False, outcomes=[timeline.outcome(number=attempt)])
        for _ in range(11):
            timeline.tick(finding(), healed=False)
    assert timeline.incident.state is State.ESCALATED
    assert timeline.incident.verdict == "not over 10 s after 2 attempts"
    assert [t.after for t in timeline.transitions].count(State.OPEN) == 2


def test_an_escalated_incident_is_over_once_healed_but_stays_escalated() -> None:
    """That opsd could not help is part of the record; the next occurrence is a new incident."""
    timeline = Timeline({"throttle": IncidentRules(verify_s=2)})
    timeline.tick(finding())
    first = timeline.incident.id
    for _ in range(4):
        timeline.tick(finding(), healed=False, idle=True)
    assert timeline.incident.state is State.ESCALATED
    for _ in range(7):
        timeline.tick(healed=True)
    assert [(i.state, i.resolved_at is None) for i in timeline.ended] == [(State.ESCALATED, False)]
    assert [t.after for t in timeline.transitions] == [State.OPEN, State.ESCALATED, State.ESCALATED]
    assert timeline.transitions[-1].text == "not over after 2 s; over later"
    timeline.tick(finding())
    assert timeline.incident.id != first


def test_a_failed_action_is_tried_again_without_waiting_for_an_effect() -> None:
    """What was not done cannot help; the last attempt's failure is left to verification, as it may heal by itself."""
    timeline = Timeline()
    timeline.tick(finding())
    timeline.act()
    timeline.tick(finding(), healed=False, outcomes=[timeline.outcome(ok=False)])
    assert (timeline.incident.state, timeline.incident.verdict) == (State.OPEN, "attempt 1 failed: no permission")
    timeline.act()
    timeline.tick(finding(), healed=False, outcomes=[timeline.outcome(ok=False, number=1)])
    assert timeline.incident.state is State.VERIFYING


def test_verification_begins_when_the_last_action_has_ended() -> None:
    """An attempt of two actions is acting until both outcomes are in."""
    timeline = Timeline()
    timeline.tick(finding())
    running = {"target": "gpu0", "outcome": "running", "detail": ""}
    timeline.act({"verb": "set_power_limit", **running}, {"verb": "notify", **running})
    timeline.tick(outcomes=[timeline.outcome(number=1)])
    assert timeline.incident.state is State.ACTING
    timeline.tick(outcomes=[timeline.outcome(number=0)])
    assert timeline.incident.state is State.VERIFYING


def test_what_cannot_be_judged_is_given_up_after_an_hour_and_not_called_resolved() -> None:
    """A run that has vanished leaves no incident behind for ever, and no false good news either."""
    timeline = Timeline()
    timeline.tick(finding())
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
    timeline.tick(finding(run="smol"))
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
        timeline.tick(finding())
        timeline.act()
        timeline.tick(finding(), outcomes=[timeline.outcome(number=number)])
        timeline.tick(finding(), seconds=11)
    assert timeline.incident.state is State.ESCALATED
    timeline.tick(healed=healed, seconds=lifecycle.UNPROVEN_S, over_since=timeline.now)
    assert timeline.ended[-1].state is State.ESCALATED


WORSE = [{"severity": Severity.CRITICAL}, {"gravity": 5}]


@pytest.mark.parametrize("changes", WORSE)
@pytest.mark.parametrize("state", [State.OPEN, State.ACTING, State.VERIFYING, State.ESCALATED])
def test_what_gets_worse_is_answered_anew_in_every_state(state: State, changes: dict[str, object]) -> None:
    """It is told once, with the new culprit; actions under way end first. What falls again is not told."""
    timeline = Timeline()
    mild, grave = finding(gravity=2), finding(gravity=3, confidence=0.5, summary="GPU 0 is lost")
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
    timeline.tick(finding(cost=Cost(0.5, 100.0)))
    timeline.tick(finding(cost=Cost(0.25, 40.0)))
    assert (timeline.incident.cost.gpu_seconds, timeline.incident.cost.throughput_ratio) == (100.0, 0.25)
    for _ in range(10):
        timeline.tick(finding(cost=Cost(0.25, 40.0, gpus=8)))
    assert timeline.incident.cost.gpu_seconds == pytest.approx(100 + 10 * 0.25 * 8)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e4), st.booleans()), min_size=1, max_size=40))
def test_each_second_lost_is_counted_once(life: list[tuple[bool, float, bool]]) -> None:
    """Over its end and its return the growth adds up to the cost of the incident, less what grew while a symptom."""
    timeline, counted, while_symptom = Timeline(), 0.0, 0.0
    for found, seconds, symptom in life:
        before = timeline.table
        timeline.tick(*[finding(cost=Cost(0.5, seconds, gpus=2))] * found, healed=not found)
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
    timeline.tick(finding())
    timeline.tick(finding(culprit=Culprit("data"), confidence=0.9, severity=Severity.CRITICAL))
    timeline.tick(finding(culprit=Culprit("network"), confidence=0.3, severity=Severity.INFO))
    assert (timeline.incident.culprit, timeline.incident.confidence) == (Culprit("data"), 0.9)
    assert timeline.incident.severity is Severity.CRITICAL


def test_evidence_is_what_was_found_first_and_what_is_found_now() -> None:
    """A sentence whose number changes every second does not pile up."""
    timeline = Timeline()
    for number in range(100):
        timeline.tick(finding(evidence=(Evidence(f"reading {number}", "nvml", timeline.now + 1),)))
    assert [evidence.text for evidence in timeline.incident.evidence] == ["reading 0", "reading 99"]


def test_evidence_is_bounded() -> None:
    """A thousand sentences leave room for both the first and the newest."""
    timeline = Timeline()
    for number in range(3):
        texts = [f"{number} {line}" for line in range(1000)]
        timeline.tick(finding(evidence=tuple(Evidence(text, "log", timeline.now + 1) for text in texts)))
    found = [evidence.text for evidence in timeline.incident.evidence]
    assert len(found) == lifecycle.MAX_EVIDENCE
    assert {text.split()[0] for text in found} == {"0", "2"}


def test_evidence_that_reads_the_same_is_fresh_each_time() -> None:
    """The policy acts on fresh evidence only, so a trouble that goes on must not look old."""
    timeline = Timeline()
    for _ in range(10):
        timeline.tick(finding(evidence=(Evidence("too hot", "nvml", timeline.now + 1),)))
    (evidence,) = timeline.incident.evidence
    assert (evidence.at, evidence.newest) == (timeline.incident.opened_at, timeline.now)
    timeline.tick(finding(evidence=(Evidence("cooler", "nvml", timeline.now + 1),)))
    assert [evidence.text for evidence in timeline.incident.evidence] == ["too hot", "cooler"]


def test_a_recommendation_is_noted_once() -> None:
    """The same advice every second is one line, and the notes are bounded."""
    timeline = Timeline()
    timeline.tick(finding())
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
        observed = Observed([finding(key) for key in keys], dict.fromkeys(current, healed), idle, outcomes)
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
