"""What launchers send each other: frames that cannot be tampered with, plans in relation to earlier ones, patience."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.launch.io.member import Member
from opsd.launch.io.wire import MAX_FRAME, Frames, WireError, encode
from opsd.launch.quorum.codec import Answers, plan_from_json, plan_to_json
from opsd.launch.quorum.peers import MOST_PATIENCE, Peer
from opsd.launch.quorum.port import Plan

MESSAGES = st.lists(st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20), max_size=4), max_size=6)
MEMBERS = st.dictionaries(
    st.sampled_from([f"n{number}" for number in range(12)]), st.integers(1, 3), min_size=1, max_size=12
).map(lambda ports: tuple(Member(name, f"10.0.0.{ports[name]}", ports[name]) for name in sorted(ports)))


def pair() -> tuple[Frames, Frames]:
    one, other = Frames(), Frames()
    one.secure(b"a" * 32, b"b" * 32)
    other.secure(b"b" * 32, b"a" * 32)
    return one, other


@given(messages=MESSAGES, pieces=st.lists(st.integers(1, 50)))
def test_frames_arrive_whole_however_they_are_cut(messages: list[dict[str, int | str]], pieces: list[int]) -> None:
    """TCP may deliver any number of bytes at a time."""
    one, other = pair()
    stream = b"".join(one.pack(encode(message)) for message in messages)
    arrived: list[object] = []
    for size in [*pieces, len(stream)]:
        arrived += other.feed(stream[:size])
        stream = stream[size:]
    assert arrived == messages


@given(place=st.integers(0), bit=st.integers(0, 7))
def test_a_changed_bit_ends_the_connection(place: int, bit: int) -> None:
    """Wherever it is, nothing of the frame is taken for what was said."""
    one, other = pair()
    frame = bytearray(one.pack(encode({"kind": "beat", "term": 3})))
    frame[place % len(frame)] ^= 1 << bit
    with contextlib.suppress(WireError):
        assert list(other.feed(bytes(frame))) == []


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (1,)])
def test_frames_cannot_be_repeated_moved_or_left_out(order: tuple[int, ...]) -> None:
    """The tag depends on how many came before."""
    one, other = pair()
    frames = [one.pack(encode({"n": number})) for number in range(2)]
    with pytest.raises(WireError, match="changed on its way"):
        for number in order:
            list(other.feed(frames[number]))


def test_a_frame_cannot_be_sent_back_to_its_sender() -> None:
    """Each direction has a key of its own."""
    one, _ = pair()
    with pytest.raises(WireError):
        list(one.feed(one.pack(encode({"kind": "beat"}))))


def test_what_is_too_large_is_refused_by_the_sender() -> None:
    """A clear error where the mistake is, and not a broken connection."""
    with pytest.raises(ValueError, match="is larger than"):
        encode({"text": "x" * (MAX_FRAME + 1)})


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
