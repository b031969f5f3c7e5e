"""What launchers agree on: plans in relation to earlier ones, patience."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opsd.launch.quorum.codec import Answers, plan_from_json, plan_to_json
from opsd.launch.quorum.peers import MOST_PATIENCE, Peer
from opsd.launch.quorum.port import Plan

from opsd.launch.io.member import Member

MEMBERS = st.dictionaries(
    st.sampled_from([f"n{number}" for number in range(12)]), st.integers(1, 3), min_size=1, max_size=12
).map(lambda ports: tuple(Member(name, f"10.0.0.{ports[name]}", ports[name]) for name in sorted(ports)))


@given(before=MEMBERS, after=MEMBERS)
def test_a_plan_is_told_by_what_has_changed(before: tuple[Member, ...], after: tuple[Member, ...]) -> None:
    """Whoever has the plan before gets the same plan as one who is told it as a whole."""
    base = Plan(1, (), before)
    plan = Plan(2, tuple(member.name for member in after[:2]), after, {"restarts": 1})
    assert plan_from_json(plan_to_json(plan, base), base) == plan
    assert plan_from_json(plan_to_json(plan)) == plan


@given(st.dictionaries(st.text(max_size=5), st.dictionaries(st.text(max_size=5), st.integers()), max_size=5))
def test_answers_are_the_same_once_unpacked(answers: dict[str, dict[str, int]]) -> None:
    """They are sent packed and read like any mapping."""
    assert dict(Answers(Answers.of(answers).packed)) == answers


def test_patience_grows_with_delay_and_not_with_the_usual_interval() -> None:
    """One that answers late gets more time, up to a bound; one that is merely asked rarely gets no more."""
    rare, late, very_late = (Peer(Member(name, "10.0.0.1", 1), 0.0) for name in "abc")
    now = 0.0
    for _ in range(20):
        now += 0.8
        rare.hear(now, 0.8)
    late.hear(1.7, 0.2)
    very_late.hear(60.0, 0.2)
    assert rare.silence(now + 2.1, 2.0) is not None
    assert late.silence(1.7 + 4.0, 2.0) is None
    assert late.silence(1.7 + 5.0, 2.0) is not None
    assert very_late.silence(60.0 + 2.0 * MOST_PATIENCE + 0.1, 2.0) is not None
