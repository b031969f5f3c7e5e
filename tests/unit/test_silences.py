"""Maintenance and mute windows: when they apply, and what they keep opsd from."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd import config
from opsd.agent.policy import Ruling, decide
from opsd.runbooks.base import Action
from opsd.settings.policy import DAYS, MINUTES_A_DAY, PolicySettings, Silence, parse_weekly
from tests.fakes.incidents import WALL, incident

MONDAY = datetime(2026, 11, 16, tzinfo=UTC)
KILL, TELL = Action("kill_process", "rank 1"), Action("notify", "node")


def once(since: float, until: float, **more: object) -> Silence:
    """A window from so many seconds after ``WALL`` to so many."""
    return Silence(
        start=datetime.fromtimestamp(WALL + since, UTC), end=datetime.fromtimestamp(WALL + until, UTC), **more
    )


def weekly(first: int, last: int) -> Silence:
    """A window between two minutes of the week."""
    days = [divmod(minute, MINUTES_A_DAY) for minute in (first, last)]
    return Silence(weekly=" - ".join(f"{DAYS[day]} {of // 60:02}:{of % 60:02}" for day, of in days))


def verdicts(**limits: tuple[Silence, ...]) -> list[tuple[Ruling, str]]:
    decisions = decide(incident(), (KILL, TELL), "act", (), PolicySettings(**limits), WALL - 1, WALL)
    return [(decision.verdict, decision.reason) for decision in decisions]


def test_in_maintenance_nothing_is_done_and_nobody_is_told() -> None:
    """The reason of the window is the reason of the refusal."""
    span = once(-1, 1, reason="new fans")
    assert verdicts(maintenance=(span,)) == [(Ruling.REFUSE, "maintenance: new fans")] * 2


def test_what_is_muted_is_done_without_a_word() -> None:
    """A muted notification does not keep the rest of the attempt from being made."""
    span = once(-1, 1)
    assert verdicts(mute=(span,)) == [(Ruling.RUN, ""), (Ruling.REFUSE, "muted")]


def test_a_window_of_other_kinds_does_not_matter() -> None:
    """Nor does one that is over."""
    other = once(-1, 1, kinds=("fan_failing",))
    over = once(-2, 0)
    assert [verdict for verdict, _ in verdicts(maintenance=(other, over))] == [Ruling.RUN, Ruling.RUN]


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
