"""The policy: what may be done, by mode, history, budget and time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd import config
from opsd.agent.actions import ActionError
from opsd.agent.incident_manager import MAX_OF_OTHERS, MAX_OF_USER, OTHERS, REST_S, Quota
from opsd.agent.judge import Judge
from opsd.agent.logs import Log
from opsd.agent.policy import HOUR_S, PastAction, Ruling, decide
from opsd.collectors.base import Reading, RunFact
from opsd.runbooks import RUNBOOKS
from opsd.runbooks.base import Action, Cost, Culprit, Evidence, Finding, Incident, Severity, State, View
from opsd.settings.policy import DAYS, MINUTES_A_DAY, PolicySettings, Silence, parse_weekly
from tests.fakes.clock import until
from tests.fakes.collectors import Agent, FakeCollector, runbook
from tests.fakes.incidents import WALL, finding, incident

# The policy: what may be done, by mode, history and time.


NOW, START = 10_000.0, 9_000.0

LIMITS = PolicySettings(cooldown_s=60, max_actions_per_hour=3)

KILL = Action("kill_process", "run/rank 1", {"pid": 7})

TELL = Action("notify", "run", reason="look")

INCIDENT = Incident(
    "id", "dataloader_stall", "key", Severity.CRITICAL, State.OPEN, "", Culprit("data"), 0.9,
    (Evidence("", "", NOW - 1),), Cost(), "", NOW - 1, NOW,
)  # fmt: skip


def verdicts(actions=(KILL,), mode="act", history=(), limits=LIMITS, incident=INCIDENT):
    return [d.verdict for d in decide(incident, actions, mode, history, limits, START, NOW)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("observe", []), ("recommend", [Ruling.RECOMMEND, Ruling.RUN]), ("act", [Ruling.RUN, Ruling.RUN])],
)
def test_the_mode_decides(mode: str, expected: list[Ruling]) -> None:
    """Observe does nothing, recommend only tells, act acts."""
    assert verdicts((KILL, TELL), mode) == expected


def test_the_same_target_is_left_alone_for_the_cool_down() -> None:
    """The cool-down is per kind and target, and a notification begins none."""
    recent = PastAction("dataloader_stall", "restart_generation", KILL.target, NOW - 59)
    assert verdicts(history=[recent]) == [Ruling.REFUSE]
    assert verdicts(history=[replace(recent, at=NOW - 60)]) == [Ruling.RUN]
    assert verdicts(history=[replace(recent, target="other")]) == [Ruling.RUN]
    assert verdicts(history=[replace(recent, kind="rank_hang")]) == [Ruling.RUN]
    assert verdicts(history=[replace(recent, verb="notify")]) == [Ruling.RUN]


def test_actions_per_hour_are_limited() -> None:
    """The fourth action within an hour is refused; notifications do not count, and are never refused for it."""
    past = [PastAction(INCIDENT.kind, "set_power_limit", str(i), NOW - 100 * i) for i in range(3)]
    assert verdicts(history=past) == [Ruling.REFUSE]
    assert verdicts(history=past[:2]) == [Ruling.RUN]
    assert verdicts(history=[*past[:2], PastAction(INCIDENT.kind, "notify", "x", NOW)]) == [Ruling.RUN]
    assert verdicts(history=[*past[:2], replace(past[2], at=NOW - 3601)]) == [Ruling.RUN]
    assert verdicts((TELL,), history=past) == [Ruling.RUN]
    assert verdicts((KILL, TELL), history=past) == [Ruling.REFUSE, Ruling.RUN]


def test_nobody_uses_up_the_actions_of_others() -> None:
    """Each kind of incident has a budget, in it each user and the hardware; what was refused costs nothing."""
    spent = [PastAction(INCIDENT.kind, "kill_process", str(i), NOW - 100, user=1000) for i in range(3)]

    def of(user: int | None, history: list[PastAction]) -> Ruling:
        (decision,) = decide(INCIDENT, (KILL,), "act", history, LIMITS, START, NOW, lambda _action: user)
        return decision.verdict

    assert of(1000, spent) is Ruling.REFUSE
    assert of(1001, spent) is of(None, spent) is Ruling.RUN
    assert of(1000, [replace(past, kind="rank_hang") for past in spent]) is Ruling.RUN
    assert of(1000, [*spent[:2], replace(spent[2], refused=True)]) is Ruling.RUN


def test_a_node_is_swapped_out_of_all_its_runs_or_of_one() -> None:
    """That is one action: users who invent runs must not make it more than an hour has."""
    swaps = tuple(Action("swap_node", "n1", {"node": "n1", "control": f"/r{number}"}) for number in range(20))

    def swap(history: list[PastAction]) -> set[Ruling]:
        decisions = decide(INCIDENT, swaps, "act", history, LIMITS, START, NOW, confirmed=swaps)
        return {decision.verdict for decision in decisions}

    before = [PastAction(INCIDENT.kind, "swap_node", "n1", NOW - 100 * hour) for hour in (1, 2, 3) for _ in swaps]
    assert swap([]) == swap(before[:40]) == {Ruling.RUN}
    assert swap(before) == {Ruling.REFUSE}


def test_no_half_of_an_attempt_is_carried_out() -> None:
    """If one action is refused, so are those that go with it."""
    history = [PastAction("dataloader_stall", "kill_process", KILL.target, NOW - 1)]
    decisions = decide(
        INCIDENT, (KILL, Action("restart_generation", "r")), "act", history, PolicySettings(), START, NOW
    )
    assert [d.verdict for d in decisions] == [Ruling.REFUSE, Ruling.REFUSE]
    assert "part of an attempt" in decisions[1].reason


def test_hardware_is_changed_only_on_the_word_of_kernel_or_driver() -> None:
    """For the same action: another power limit is another one."""
    limit = Action("set_power_limit", "gpu", {"watts": 500})

    def verdict(*confirmed: Action) -> list[Ruling]:
        return [
            d.verdict for d in decide(INCIDENT, (limit,), "act", (), PolicySettings(), START, NOW, confirmed=confirmed)
        ]

    assert verdict() == [Ruling.REFUSE]
    assert verdict(replace(limit, args={"watts": 100})) == [Ruling.REFUSE]
    assert verdict(replace(limit, reason="in other words")) == [Ruling.RUN]


def test_a_node_is_drained_only_where_that_was_allowed() -> None:
    """Elsewhere it is recommended, and the rest is done."""
    drain, notice = Action("drain_node", "n1", {"node": "n1"}), Action("notify", "n1")
    told = (notice, Ruling.RUN, "")
    for allowed, wanted in (
        (False, [told, (drain, Ruling.RECOMMEND, "draining is switched off (policy.drain)")]),
        (True, [(drain, Ruling.RUN, ""), told]),
    ):
        limits = PolicySettings(drain=allowed)
        decisions = decide(INCIDENT, (drain, notice), "act", (), limits, START, NOW, confirmed=(drain,))
        assert [(d.action, d.verdict, d.reason) for d in decisions] == wanted


def test_nothing_is_done_about_what_happened_before_the_agent_started() -> None:
    """Old events read after a restart never lead to an action; fresh evidence of the same incident does."""
    old = replace(INCIDENT, evidence=(Evidence("", "", START - 1),), opened_at=START - 1)
    assert verdicts(incident=old) == [Ruling.REFUSE]
    seen_again = replace(old, evidence=(*old.evidence, Evidence("", "", NOW)))
    assert verdicts(incident=seen_again) == [Ruling.RUN]


# Whose budget an action is counted on, and what costs none.


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


# Maintenance and mute windows: when they apply, and what they keep opsd from.


MONDAY = datetime(2026, 11, 16, tzinfo=UTC)

KILL_RANK, TELL_SOMEBODY = Action("kill_process", "rank 1"), Action("notify", "node")


def once(since: float, until: float, **more: object) -> Silence:
    """A window from so many seconds after ``WALL`` to so many."""
    return Silence(
        start=datetime.fromtimestamp(WALL + since, UTC), end=datetime.fromtimestamp(WALL + until, UTC), **more
    )


def weekly(first: int, last: int) -> Silence:
    """A window between two minutes of the week."""
    days = [divmod(minute, MINUTES_A_DAY) for minute in (first, last)]
    return Silence(weekly=" - ".join(f"{DAYS[day]} {of // 60:02}:{of % 60:02}" for day, of in days))


def decided(**limits: tuple[Silence, ...]) -> list[tuple[Ruling, str]]:
    decisions = decide(incident(), (KILL_RANK, TELL_SOMEBODY), "act", (), PolicySettings(**limits), WALL - 1, WALL)
    return [(decision.verdict, decision.reason) for decision in decisions]


def test_in_maintenance_nothing_is_done_and_nobody_is_told() -> None:
    """The reason of the window is the reason of the refusal."""
    span = once(-1, 1, reason="new fans")
    assert decided(maintenance=(span,)) == [(Ruling.REFUSE, "maintenance: new fans")] * 2


def test_what_is_muted_is_done_without_a_word() -> None:
    """A muted notification does not keep the rest of the attempt from being made."""
    span = once(-1, 1)
    assert decided(mute=(span,)) == [(Ruling.RUN, ""), (Ruling.REFUSE, "muted")]


def test_a_window_of_other_kinds_does_not_matter() -> None:
    """Nor does one that is over."""
    other = once(-1, 1, kinds=("fan_failing",))
    over = once(-2, 0)
    assert [verdict for verdict, _ in decided(maintenance=(other, over))] == [Ruling.RUN, Ruling.RUN]


def test_a_weekly_window_may_go_over_the_end_of_the_week() -> None:
    """From Saturday evening to Monday morning."""
    span = Silence(weekly="Sat 22:00 - mon 06:00")
    hours = {hour: span.covers("any", (MONDAY + timedelta(hours=hour)).timestamp()) for hour in (5, 6, 141, 142, 167)}
    assert hours == {5: True, 6: False, 141: False, 142: True, 167: True}


@given(st.integers(0, 10_079), st.integers(0, 10_079), st.integers(0, 10_079))
def test_a_window_and_its_complement_cover_the_week_once(first: int, last: int, minute: int) -> None:
    """Every minute lies in exactly one of the two."""
    wall = (MONDAY + timedelta(minutes=minute)).timestamp()
    if first != last:
        assert weekly(first, last).covers("k", wall) != weekly(last, first).covers("k", wall)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[policy.mute]]\nweekly = 'weekends'", 'policy.mute.0.weekly: should be like "sat 22:00 - sun 06:00"'),
        ("[[policy.mute]]\nweekly = 'sat 25:00 - sun 06:00'", "has the time 25:00, which does not exist"),
        ("[[policy.mute]]\nweekly = 'sam 22:00 - sun 06:00'", "has the day sam; days are mon"),
        ("[[policy.mute]]\nstart = 2026-01-01T00:00:00Z", "should have either start and end, or weekly"),
        (
            "[[policy.maintenance]]\nstart = 2026-01-02T00:00:00Z\nend = 2026-01-01T00:00:00Z",
            "should end after its start",
        ),
        ("[[policy.maintenance]]\nstart = 2026-01-01T00:00:00\nend = 2026-01-02T00:00:00Z", "timezone"),
        (
            "[[policy.mute]]\nweekly = 'sat 22:00 - sun 06:00'\nkinds = ['fan_faling']",
            "did you mean policy.mute.kinds.",
        ),
        ("[policy.runbooks.gpu_throttle]\nmood = 'act'", "policy.runbooks.gpu_throttle"),
    ],
)
def test_a_mistake_in_a_window_is_one_sentence(tmp_path, text: str, said: str) -> None:
    """A window that does not apply when it should is found out too late."""
    file = tmp_path / "opsd.toml"
    file.write_text(text)
    with pytest.raises(config.ConfigError, match=r"^[^\n]*$") as caught:
        config.load(file, env={})
    assert said in str(caught.value)


def test_windows_and_overrides_come_from_the_file_and_can_be_shown(tmp_path) -> None:
    """What `opsd config show` prints is read back as the same."""
    file = tmp_path / "opsd.toml"
    file.write_text(
        "[policy]\nmode = 'recommend'\n[policy.runbooks]\nrank_hang = 'act'\ngpu_throttle = { cooldown_s = 900.0 }\n"
        "[[policy.maintenance]]\nstart = 2026-01-01T00:00:00Z\nend = 2026-01-02T00:00:00+01:00\nreason = 'fans'\n"
        "[[policy.mute]]\nweekly = 'sat 22:00 - sun 06:00'\nkinds = ['fan_failing']\n"
    )
    settings = config.load(file, env={})
    policy = settings.policy
    assert (policy.mode_of("rank_hang"), policy.mode_of("gpu_throttle")) == ("act", "recommend")
    assert (policy.cooldown_of("rank_hang"), policy.cooldown_of("gpu_throttle")) == (60, 900)
    assert policy.muted("fan_failing", (MONDAY + timedelta(days=5, hours=23)).timestamp()) == "muted"
    assert policy.maintenance[0].end - policy.maintenance[0].start == timedelta(hours=23)
    file.write_text(config.to_toml(settings))
    assert config.load(file, env={}).policy == policy


def test_the_week_has_seven_days() -> None:
    """The last minute that can be written is its end."""
    assert parse_weekly("mon 00:00 - sun 24:00") == (0, 7 * MINUTES_A_DAY)


# How many incidents the runs of one user may have.


USERS = {"mine": 1000, "other": 1001, "of root": 0}


def trouble(kind: str, run: str, key: int) -> Finding:
    """One of a run, or of a GPU."""
    return Finding(f"{run}/{key}", Severity.WARNING, "", Culprit("node", "n1"), 1.0, (), run=run, kind=kind)


def names(findings: list[Finding]) -> set[tuple[str, str]]:
    """Kinds and keys, as incidents have them."""
    return {(found.kind, found.key) for found in findings}


def test_a_user_without_end_has_so_many_incidents_and_others_have_all() -> None:
    """What is about hardware is not limited, and an incident there is stays; another may open a while after its end."""
    quota, told = Quota(), {"loss_nan"}
    mine = [trouble("loss_nan", "mine", key) for key in range(3 * MAX_OF_USER)]
    others = [trouble("loss_nan", "other", 1), *(trouble("gpu_xid", "mine", key) for key in range(200))]
    current = names(quota.admit([*mine, *others], told, (), USERS, 0.0))
    assert len(current) == MAX_OF_USER + len(others)
    assert quota.exceeded == {1000}
    again = names(quota.admit([*reversed(mine), *others], told, current, USERS, 0.0))
    assert again == current
    current.remove(("loss_nan", "mine/3"))
    assert not quota.admit(mine[MAX_OF_USER:], told, current, USERS, REST_S - 1)
    after = names(quota.admit(mine[MAX_OF_USER:], told, current, USERS, 2 * REST_S - 2))
    assert len(after) == 1
    assert not names(quota.admit([], told, after, USERS, 2 * REST_S)) and not quota.exceeded


def test_incidents_of_runs_that_are_gone_count_on() -> None:
    """Else a user could open as many again with runs of other names."""
    quota, told = Quota(), {"loss_nan"}
    current = names(quota.admit([trouble("loss_nan", "mine", key) for key in range(MAX_OF_USER)], told, (), USERS, 0.0))
    assert quota.admit([trouble("loss_nan", "next", 1)], told, current, {"next": 1000}, 1.0) == []
    assert quota.exceeded == {1000}


def test_an_event_of_a_run_that_is_gone_still_counts_for_its_user() -> None:
    """The run was removed at once; what it said remains in the window, and is found again in each tick."""
    quota, told = Quota(), {"loss_nan"}
    found = [trouble("loss_nan", "mine", key) for key in range(3 * MAX_OF_USER)]
    current = names(quota.admit(found, told, (), USERS, 0.0))
    assert names(quota.admit(found, told, current, {}, 1.0)) == current
    assert quota.exceeded == {1000}


def test_user_ids_without_number_have_no_more_together() -> None:
    """Each of a user namespace has a run; a user whose rank is on a GPU, or was minutes ago, has its own incidents."""
    quota, told = Quota(), {"loss_nan"}
    users = {f"id-{number}": 100_000 + number for number in range(100)} | USERS
    quota.admit([], told, (), users, 0.0, working={1000})
    found = [trouble("loss_nan", f"id-{number}", key) for number in range(100) for key in range(MAX_OF_USER)]
    current = names(quota.admit(found, told, (), users, 1.0))
    assert len(current) == MAX_OF_OTHERS
    assert quota.exceeded == {OTHERS}
    mine, other = trouble("loss_nan", "mine", 1), trouble("loss_nan", "other", 1)
    assert quota.admit([mine, other], told, current, users, REST_S - 1) == [mine]


def test_runs_of_which_nobody_was_seen_share_a_quota() -> None:
    """Made and removed between two looks."""
    quota, told = Quota(), {"loss_nan"}
    found = [trouble("loss_nan", f"gone-{key}", key) for key in range(3 * MAX_OF_USER)]
    assert len(quota.admit(found, told, (), {}, 0.0)) == MAX_OF_USER
    assert quota.exceeded == {None}


def test_runs_that_last_for_seconds_open_no_more_incidents() -> None:
    """Each ends its incidents and is followed by another."""
    quota, told, opened = Quota(), {"loss_nan"}, set[tuple[str, str]]()
    for second in range(int(REST_S)):
        found = [trouble("loss_nan", "mine", 10 * second + key) for key in range(10)]
        opened |= names(quota.admit(found, told, (), USERS, float(second)))
    assert len(opened) == MAX_OF_USER


def test_a_node_that_slurm_cannot_reach_is_nobodys() -> None:
    """That a run has lost nodes is what its launcher says; the same incident by Slurm's word names no run."""
    told = Judge(RUNBOOKS, Log(lambda _: None)).told_by_users
    lost = [trouble("node_unreachable", "mine", key) for key in range(2 * MAX_OF_USER)]
    silent = Finding("node1", Severity.CRITICAL, "", Culprit("node"), 1.0, (), kind="node_unreachable")
    admitted = Quota().admit([*lost, silent], told, (), USERS, 0.0)
    assert len(admitted) == MAX_OF_USER + 1
    assert silent in admitted


@given(st.lists(st.lists(st.tuples(st.sampled_from(sorted(USERS)), st.integers(0, 200)), max_size=150), max_size=6))
def test_nobody_ever_has_more(ticks: list[list[tuple[str, int]]]) -> None:
    """Whatever is found when; nothing that is an incident is ever left out."""
    quota, current = Quota(), set[tuple[str, str]]()
    for tick in ticks:
        found = [trouble("loss_nan", run, key) for run, key in tick]
        admitted = names(quota.admit(found, {"loss_nan"}, current, USERS, 0.0))
        assert current & names(found) <= admitted
        current |= admitted
        for run in USERS:
            assert sum(key.startswith(f"{run}/") for _, key in current) <= MAX_OF_USER
