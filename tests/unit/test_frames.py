"""What launchers send each other: frames that arrive whole and cannot be tampered with."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.launch.io.connection import MAX_FRAME, Frames, encode
from opsd.launch.io.handshake import WireError

MESSAGES = st.lists(st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20), max_size=4), max_size=6)


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
    """Nothing of the frame, at any place, is taken for its content."""
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
