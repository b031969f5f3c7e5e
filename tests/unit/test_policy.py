"""The policy: what may be done, by mode, history and time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opsd.agent.policy import PastAction, Ruling, decide
from opsd.runbooks.base import Action, Cost, Culprit, Evidence, Incident, Severity, State
from opsd.settings.policy import PolicySettings

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
    """Elsewhere it is nothing to recommend or to refuse, and the rest is done."""
    drain, notice = Action("drain_node", "n1", {"node": "n1"}), Action("notify", "n1")
    for allowed, verbs in ((False, ["notify"]), (True, ["drain_node", "notify"])):
        limits = PolicySettings(drain=allowed)
        decisions = decide(INCIDENT, (drain, notice), "act", (), limits, START, NOW, confirmed=(drain,))
        assert [(d.action.verb, d.verdict) for d in decisions] == [(verb, Ruling.RUN) for verb in verbs]


def test_nothing_is_done_about_what_happened_before_the_agent_started() -> None:
    """Old events read after a restart never lead to an action; fresh evidence of the same incident does."""
    old = replace(INCIDENT, evidence=(Evidence("", "", START - 1),), opened_at=START - 1)
    assert verdicts(incident=old) == [Ruling.REFUSE]
    seen_again = replace(old, evidence=(*old.evidence, Evidence("", "", NOW)))
    assert verdicts(incident=seen_again) == [Ruling.RUN]
