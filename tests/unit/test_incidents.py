"""The life of an incident, whatever is found, healed and done in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opsd.agent import incidents, lifecycle
from opsd.agent.incidents import Book, Transition, reduce
from opsd.agent.lifecycle import IncidentRules, Observed, Outcome
from opsd.runbooks.base import Cost, Culprit, Evidence, Finding, Incident, Severity, State

RULES = {"throttle": IncidentRules(open_after_s=0, clear_after_s=3, verify_s=10, max_attempts=2)}
T0 = 1_700_000_000.0


def finding(key: str = "gpu0", **changes: object) -> Finding:
    base = Finding(
        "throttle", key, Severity.WARNING, "GPU 0 is slow", Culprit("gpu", "node", 0), 0.8,
        (Evidence("too hot", "nvml", T0),), Cost(0.1, 10.0),
    )  # fmt: skip
    return replace(base, **changes)


@dataclass
class Patient:
    """Plays ticks of one second and remembers everything."""

    rules: dict[str, IncidentRules] = field(default_factory=lambda: RULES)
    book: Book = field(default_factory=Book)
    now: float = T0
    ended: list[Incident] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)

    def tick(self, *found: Finding, healed: bool | None = None, idle: bool = False, outcomes=(), seconds=1.0) -> None:
        self.now += seconds
        ids = [incident.id for incident in self.book.incidents.values()]
        observed = Observed(found, dict.fromkeys(ids, healed), frozenset(ids if idle else ()), outcomes)
        self.book, ended, transitions = reduce(self.book, observed, self.rules, self.now)
        self.ended += ended
        self.transitions += transitions

    @property
    def incident(self) -> Incident:
        (incident,) = self.book.incidents.values()
        return incident

    def act(self, *records: dict[str, object]) -> None:
        records = records or ({"verb": "set_power_limit", "target": "gpu0", "outcome": "running", "detail": ""},)
        name, incident = next(iter(self.book.incidents.items()))
        self.book = replace(self.book, incidents={name: lifecycle.started(incident, records, self.now)})

    def outcome(self, ok: bool = True, number: int = 0) -> Outcome:
        return Outcome(self.incident.id, number, ok, "done" if ok else "no permission")


def test_a_finding_opens_one_incident_however_often_it_is_found() -> None:
    """The same kind and key is the same incident; another key is another one."""
    patient = Patient()
    for _ in range(5):
        patient.tick(finding(), finding("gpu1"))
    assert len(patient.book.incidents) == 2
    assert [t.after for t in patient.transitions] == [State.OPEN, State.OPEN]


def test_an_incident_opens_only_once_it_was_found_for_long_enough() -> None:
    """A shorter finding leaves no trace, and a gap of two ticks does not restart the time."""
    patient = Patient({"throttle": IncidentRules(open_after_s=5)})
    patient.tick(finding())
    for _ in range(5):
        patient.tick()
    assert not patient.book.pending
    for found in ([finding()], [], [finding()], [finding()], [finding()], [finding()]):
        assert not patient.book.incidents
        patient.tick(*found)
    assert patient.incident.state is State.OPEN


def test_a_remedy_that_helps_resolves_the_incident() -> None:
    """open, acting, verifying, resolved; and what was done stands in the incident."""
    patient = Patient()
    patient.tick(finding())
    patient.act()
    assert patient.incident.state is State.ACTING
    patient.tick(finding(), healed=True, outcomes=[patient.outcome()])
    assert patient.incident.state is State.VERIFYING
    for _ in range(4):
        patient.tick(healed=True)
    (resolved,) = patient.ended
    assert (resolved.state, resolved.attempts, resolved.resolved_at) == (State.RESOLVED, 1, T0 + 5)
    assert [(a["outcome"], a["detail"]) for a in resolved.actions] == [("ok", "done")]
    assert not patient.book.incidents


def test_a_remedy_that_does_not_help_is_tried_again_and_then_escalated() -> None:
    """After max_attempts an incident is a person's; it stays current and opens no second one."""
    patient = Patient()
    patient.tick(finding())
    for attempt in (0, 1):
        patient.act()
        patient.tick(finding(), healed=False, outcomes=[patient.outcome(number=attempt)])
        for _ in range(11):
            patient.tick(finding(), healed=False)
    assert patient.incident.state is State.ESCALATED
    assert patient.incident.verdict == "not over 10 s after 2 attempts"
    assert [t.after for t in patient.transitions].count(State.OPEN) == 2


def test_an_escalated_incident_is_over_once_healed_but_stays_escalated() -> None:
    """That opsd could not help is part of the record; the next occurrence is a new incident."""
    patient = Patient({"throttle": IncidentRules(verify_s=2)})
    patient.tick(finding())
    first = patient.incident.id
    for _ in range(4):
        patient.tick(finding(), healed=False, idle=True)
    assert patient.incident.state is State.ESCALATED
    for _ in range(7):
        patient.tick(healed=True)
    assert [(i.state, i.resolved_at is None) for i in patient.ended] == [(State.ESCALATED, False)]
    assert [t.after for t in patient.transitions] == [State.OPEN, State.ESCALATED, State.ESCALATED]
    assert patient.transitions[-1].text == "not over after 2 s; over since"
    patient.tick(finding())
    assert patient.incident.id != first


def test_a_failed_action_is_tried_again_without_waiting_for_an_effect() -> None:
    """What was not done cannot help; the last attempt's failure is left to verification, as it may heal by itself."""
    patient = Patient()
    patient.tick(finding())
    patient.act()
    patient.tick(finding(), healed=False, outcomes=[patient.outcome(ok=False)])
    assert (patient.incident.state, patient.incident.verdict) == (State.OPEN, "attempt 1 failed: no permission")
    patient.act()
    patient.tick(finding(), healed=False, outcomes=[patient.outcome(ok=False, number=1)])
    assert patient.incident.state is State.VERIFYING


def test_verification_begins_when_the_last_action_has_ended() -> None:
    """An attempt of two actions is acting until both outcomes are in."""
    patient = Patient()
    patient.tick(finding())
    running = {"target": "gpu0", "outcome": "running", "detail": ""}
    patient.act({"verb": "set_power_limit", **running}, {"verb": "notify", **running})
    patient.tick(outcomes=[patient.outcome(number=1)])
    assert patient.incident.state is State.ACTING
    patient.tick(outcomes=[patient.outcome(number=0)])
    assert patient.incident.state is State.VERIFYING


def test_what_cannot_be_judged_is_given_up_after_an_hour_and_not_called_resolved() -> None:
    """A run that has vanished leaves no incident behind for ever, and no false good news either."""
    patient = Patient()
    patient.tick(finding())
    patient.tick(healed=None, seconds=lifecycle.GIVE_UP_S - 10)
    assert patient.incident.state is State.OPEN
    patient.tick(healed=None, seconds=20)
    (ended,) = patient.ended
    assert ended.state is State.ESCALATED
    assert "nothing is known" in ended.verdict


def test_cost_accumulates_over_the_life_of_the_incident() -> None:
    """GPU-seconds never shrink, and grow with the share lost where the finding says how many GPUs pay."""
    patient = Patient()
    patient.tick(finding(cost=Cost(0.5, 100.0)))
    patient.tick(finding(cost=Cost(0.25, 40.0)))
    assert (patient.incident.cost.gpu_seconds, patient.incident.cost.throughput_ratio) == (100.0, 0.25)
    for _ in range(10):
        patient.tick(finding(cost=Cost(0.25, 40.0, gpus=8)))
    assert patient.incident.cost.gpu_seconds == pytest.approx(100 + 10 * 0.25 * 8)


def test_a_surer_finding_corrects_the_culprit_and_a_less_sure_one_does_not() -> None:
    """Severity only grows, and the diagnosis is the surest so far."""
    patient = Patient()
    patient.tick(finding())
    patient.tick(finding(culprit=Culprit("data"), confidence=0.9, severity=Severity.CRITICAL))
    patient.tick(finding(culprit=Culprit("network"), confidence=0.3, severity=Severity.INFO))
    assert (patient.incident.culprit, patient.incident.confidence) == (Culprit("data"), 0.9)
    assert patient.incident.severity is Severity.CRITICAL


def test_evidence_is_what_was_found_first_and_what_is_found_now() -> None:
    """A sentence whose number changes every second does not pile up."""
    patient = Patient()
    for number in range(100):
        patient.tick(finding(evidence=(Evidence(f"reading {number}", "nvml", patient.now + 1),)))
    assert [evidence.text for evidence in patient.incident.evidence] == ["reading 0", "reading 99"]


def test_evidence_is_bounded() -> None:
    """A thousand sentences leave room for both the first and the newest."""
    patient = Patient()
    for number in range(3):
        texts = [f"{number} {line}" for line in range(1000)]
        patient.tick(finding(evidence=tuple(Evidence(text, "log", patient.now + 1) for text in texts)))
    found = [evidence.text for evidence in patient.incident.evidence]
    assert len(found) == lifecycle.MAX_EVIDENCE
    assert {text.split()[0] for text in found} == {"0", "2"}


def test_evidence_that_reads_the_same_is_fresh_each_time() -> None:
    """The policy acts on fresh evidence only, so a trouble that goes on must not look old."""
    patient = Patient()
    for _ in range(10):
        patient.tick(finding(evidence=(Evidence("too hot", "nvml", patient.now + 1),)))
    assert max(evidence.at for evidence in patient.incident.evidence) == patient.now


def test_a_recommendation_is_noted_once() -> None:
    """The same advice every second is one line, and the notes are bounded."""
    patient = Patient()
    patient.tick(finding())
    note = {"verb": "kill_process", "target": "r0", "outcome": "recommended", "detail": ""}
    incident = lifecycle.noted(lifecycle.noted(patient.incident, [note]), [note])
    assert len(incident.actions) == 1
    many = [{**note, "target": str(i)} for i in range(200)]
    assert len(lifecycle.noted(incident, many).actions) == lifecycle.MAX_ACTIONS


def test_an_action_under_way_at_a_restart_is_verified_and_not_repeated() -> None:
    """Nobody knows whether it was carried out, so its effect is looked for."""
    patient = Patient()
    patient.tick(finding())
    patient.act()
    loaded = lifecycle.resumed(patient.incident, patient.now + 60)
    assert (loaded.state, loaded.attempts, loaded.acted_at) == (State.VERIFYING, 1, patient.now + 60)
    assert loaded.actions[0]["outcome"] == "unknown"


def test_a_step_of_the_clock_does_not_cut_a_hold_time_short() -> None:
    """An hour's jump neither resolves nor escalates."""
    patient = Patient()
    patient.tick(finding())
    patient.tick(healed=True)
    patient.book = incidents.shifted(patient.book, 3600)
    patient.now += 3600
    patient.tick(healed=True)
    assert patient.incident.state is State.OPEN


@pytest.mark.parametrize("step", [2 * lifecycle.GIVE_UP_S, -2 * lifecycle.GIVE_UP_S])
def test_a_step_of_the_clock_ends_no_wait_and_restarts_none(step: float) -> None:
    """Neither what is unseen nor what nobody can help is a person's turn at once, or hours too late."""
    unseen, idle = Patient(), Patient()
    for patient in (unseen, idle):
        patient.tick(finding())
        patient.book = incidents.shifted(patient.book, step)
        patient.now += step
    unseen.tick()
    assert unseen.incident.state is State.OPEN
    idle.tick(finding(), healed=False, idle=True)
    assert idle.incident.state is State.OPEN
    idle.tick(finding(), healed=False, idle=True, seconds=RULES["throttle"].verify_s)
    assert idle.incident.state is State.ESCALATED


@pytest.mark.parametrize("step", [3600, -3600])
def test_a_step_of_the_clock_does_not_change_how_long_something_may_come_back(step: float) -> None:
    """What was over a second ago is the same incident, whatever the clock says now."""
    patient = Patient(rules={"throttle": IncidentRules(clear_after_s=0, hold_s=60)})
    patient.tick(finding())
    first = patient.incident.id
    patient.tick(healed=True)
    patient.book = incidents.shifted(patient.book, step)
    patient.now += step
    patient.tick(finding())
    assert patient.incident.id == first
    patient.tick(healed=True)
    patient.tick(finding(), seconds=61)
    assert patient.incident.id != first


@pytest.mark.parametrize("state", [State.OPEN, State.VERIFYING])
def test_the_time_in_which_no_agent_watched_ends_no_wait(state: State) -> None:
    """After hours of repair the collectors need some seconds before anything is known: nobody is called for those."""
    patient = Patient()
    patient.tick(finding())
    name, before = next(iter(patient.book.incidents.items()))
    before = replace(before, state=state, acted_at=patient.now if state is State.VERIFYING else None)
    patient.now += 2 * lifecycle.GIVE_UP_S
    patient.book = Book({name: lifecycle.resumed(before, patient.now)}, watching_since=patient.now)
    patient.tick(idle=True)
    assert patient.incident.state is state
    patient.tick(healed=True)
    patient.tick(healed=True, seconds=RULES["throttle"].clear_after_s)
    assert patient.ended[0].state is State.RESOLVED


def test_health_seen_by_an_earlier_agent_does_not_count() -> None:
    """Nobody knows whether it stayed healthy meanwhile."""
    patient = Patient()
    patient.tick(finding())
    patient.tick(healed=True)
    name, before = next(iter(patient.book.incidents.items()))
    patient.now += 3600
    patient.book = Book({name: lifecycle.resumed(before, patient.now)}, watching_since=patient.now)
    patient.tick(healed=True)
    assert patient.incident.state is State.OPEN


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
    now, book, ids, final = T0, Book(), set(), {}
    healed_since: dict[str, float | None] = {}
    for keys, healed, doing, seconds in history:
        now += seconds
        before = book
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
        book, ended, transitions = reduce(before, observed, RULES, now)
        for transition in transitions:
            if transition.before is None:
                assert transition.incident not in ids
                ids.add(transition.incident)
        for incident in (*book.incidents.values(), *ended):
            assert final.get(incident.id, incident.state) is incident.state
            assert incident.attempts <= RULES["throttle"].max_attempts
            if incident.state in (State.RESOLVED, State.ESCALATED):
                final[incident.id] = incident.state
            if incident.state is State.RESOLVED:
                since = healed_since[incident.id]
                assert since is not None
                assert now - since >= RULES["throttle"].clear_after_s
        assert all(i.resolved_at is not None for i in ended)
        assert all(i.resolved_at is None for i in book.incidents.values())
        if doing == "act":
            record = {"verb": "v", "target": "t", "outcome": "running", "detail": ""}
            acted = {
                name: lifecycle.started(i, [record], now)
                if i.state is State.OPEN and i.attempts < RULES["throttle"].max_attempts
                else i
                for name, i in book.incidents.items()
            }
            book = replace(book, incidents=acted)
