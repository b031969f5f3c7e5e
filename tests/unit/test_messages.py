"""What launchers send each other: how they meet, frames, messages, and how much."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.launch.io.connection import BYTES_PER_S, MAX_FRAME, MESSAGES_PER_S, PATIENCE_S, Frames, RateLimit, encode
from opsd.launch.io.handshake import VERSION, Handshake, Identity, Refusal, WireError, new_incarnation
from opsd.launch.io.protocol import Codec, Member, ProtocolError, rows, wire_name

# How two launchers find out that they belong together, without a network.


ONE = Identity(Member("n1", "10.0.0.1", 7), "run", b"s" * 32)

TWO = Identity(Member("n2", "10.0.0.2", 7), "run", b"s" * 32)


def shake(caller: Identity, called: Identity, *, change: dict[str, Any] | None = None) -> tuple[Handshake, Handshake]:
    """Both sides after all that they have to say; ``change`` is done to what the caller says first."""
    sides = Handshake(caller, called.member), Handshake(called, None)
    told = [{**message, **(change or {})} for message in sides[0].begin()]
    turn = 1
    while told:
        told = [answer for message in told for answer in sides[turn].hear(json.loads(json.dumps(message)))]
        turn = 1 - turn
    return sides


def test_both_sides_prove_themselves() -> None:
    """Each knows then who the other is, which process, and how to secure what follows."""
    caller, called = shake(ONE, TWO)
    assert caller.proven and called.proven
    assert (caller.peer, called.peer) == (TWO.member, ONE.member)
    assert (caller.incarnation, called.incarnation) == (TWO.incarnation, ONE.incarnation)
    assert (caller.key_in, caller.key_out) == (called.key_out, called.key_in)
    assert caller.key_in != caller.key_out


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(TWO, secret=b"t" * 32), "does not know the secret of this run"),
        (replace(TWO, run="other"), "belongs to the run 'run' and not to 'other'"),
        (replace(TWO, member=Member("n1", "10.0.0.2", 7)), "has the same name, 'n1'"),
    ],
)
def test_who_does_not_belong_to_the_run_is_refused(other: Identity, why: str) -> None:
    """With a sentence that both sides can say."""
    with pytest.raises(Refusal, match=why):
        shake(ONE, other)


def test_who_answers_in_the_place_of_another_is_refused() -> None:
    """Its address may have been given to another node."""
    caller, called = Handshake(ONE, Member("n3", "10.0.0.2", 7)), Handshake(TWO, None)
    (greeting,) = caller.begin()
    with pytest.raises(Refusal, match="'n2' answers where 'n3' should be"):
        caller.hear(called.hear(greeting)[0])


@pytest.mark.parametrize("version", [VERSION + 2, VERSION - 1, 0, -1])
def test_a_version_too_far_away_is_refused(version: int) -> None:
    """Whatever else it says."""
    with pytest.raises(Refusal, match=f"speaks version {version} and this one {VERSION}; install the same opsd"):
        Handshake(ONE, None).hear({"opsd": version})


def test_the_next_version_is_understood() -> None:
    """Also if it says more of itself, which both sides prove to have heard."""
    caller, called = Handshake(ONE, TWO.member), Handshake(TWO, None)
    mine, proof = called.hear(caller.begin()[0] | {"opsd": VERSION + 1, "load": 0.5})
    caller.hear(mine)
    with pytest.raises(Refusal):
        caller.hear(proof)  # it was not the caller who has said that
    newer = Handshake(ONE, TWO.member)
    newer._mine.update({"opsd": VERSION + 1, "load": 0.5})
    called = Handshake(TWO, None)
    told = [newer.hear(message) for message in called.hear(newer.begin()[0])]
    called.hear(told[1][0])
    assert newer.proven and called.proven


@pytest.mark.parametrize(
    "messages",
    [
        [{}],
        [{"kind": "greeting", "opsd": VERSION}],
        [{"kind": "proof", "proof": "00"}],
        [{"kind": "beat"}],
        [{"kind": "greeting", "opsd": "2"}],
        [{"kind": "greeting", "opsd": VERSION, "run": "run", "member": ["n2", "10.0.0.2", 7], "nonce": "00"}],
    ],
)
def test_nonsense_ends_the_connection(messages: list[dict[str, Any]]) -> None:
    """Nobody is told anything."""
    with pytest.raises(WireError, match="does not speak the language of opsd launch") as error:
        for message in messages:
            Handshake(ONE, None).hear(message)
    assert not isinstance(error.value, Refusal)


@pytest.mark.parametrize("proof", ["", "00", "zz", "é", "\ud800", "0" * 64])
def test_a_wrong_proof_is_refused(proof: str) -> None:
    """Whatever it is made of."""
    called = Handshake(TWO, None)
    called.hear(Handshake(ONE, TWO.member).begin()[0])
    with pytest.raises(Refusal, match="does not know the secret"):
        called.hear({"kind": "proof", "proof": proof})
    assert not called.proven


def test_a_proof_cannot_be_used_again() -> None:
    """It belongs to the random numbers of one connection."""
    caller, called = Handshake(ONE, TWO.member), Handshake(TWO, None)
    greeting = caller.begin()[0]
    (proof,) = [answer for message in called.hear(greeting) for answer in caller.hear(message)]
    again = Handshake(TWO, None)
    again.hear(greeting)
    with pytest.raises(Refusal):
        again.hear(proof)


def test_a_proof_cannot_be_sent_back() -> None:
    """Who is called has another one than who calls."""
    called = Handshake(TWO, None)
    _, proof = called.hear(Handshake(ONE, TWO.member).begin()[0])
    with pytest.raises(Refusal):
        called.hear(proof)


def test_a_later_process_has_a_greater_incarnation() -> None:
    """So that all others agree which of two is the one that counts."""
    assert sorted(given := [new_incarnation() for _ in range(100)]) == given
    assert len(set(given)) == 100


def test_the_secret_is_not_shown() -> None:
    """An identity may end up in a traceback."""
    assert "ssss" not in repr(ONE)


# Messages as dataclasses: what is sent arrives as it was, and what is not as its kind says is refused by name.


class Reason(Enum):
    LOST = "lost"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Place:
    node: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Beat:
    """The sender is there,
    and what it sees. This is not in the table.
    """

    direction: ClassVar[str] = "all to all"

    number: int
    lag_s: float
    busy: bool
    reason: Reason
    who: str | None = None
    places: tuple[Place, ...] = ()
    seen: dict[str, float] = field(default_factory=dict)
    note: Any = None


@dataclass(frozen=True, slots=True)
class GoOn:
    """Nothing else."""

    def __post_init__(self) -> None:
        pass


CODEC = Codec((Beat, GoOn))

FINITE = st.floats(allow_nan=False, allow_infinity=False)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)

PLACES = st.builds(Place, st.text(max_size=3), st.lists(st.integers(), max_size=3).map(tuple))

BEATS = st.builds(
    Beat, st.integers(), FINITE, st.booleans(), st.sampled_from(Reason), st.none() | st.text(max_size=5),
    st.lists(PLACES, max_size=3).map(tuple),
    st.dictionaries(st.text(max_size=3), FINITE, max_size=3), JSON,
)  # fmt: skip

RAW = {"kind": "beat", "number": 3, "lag_s": 0.5, "busy": False, "reason": "lost"}


@given(BEATS | st.just(GoOn()))
def test_a_message_arrives_as_it_was_sent(message: object) -> None:
    """Through JSON, with every kind of field."""
    assert CODEC.decode(json.loads(json.dumps(CODEC.encode(message)))) == message


@given(JSON | st.dictionaries(st.sampled_from(sorted({*RAW, "places", "seen", "who"})), JSON))
def test_whatever_comes_is_a_message_or_a_protocol_error(raw: Any) -> None:
    """A neighbour that sends nonsense cannot bring the launcher down."""
    if isinstance(raw, dict):
        with contextlib.suppress(ProtocolError):
            assert type(CODEC.decode({**RAW, **raw})) is Beat


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"number": "3"}, "'beat' whose number is not a whole number"),
        ({"number": True}, "'beat' whose number is not a whole number"),
        ({"number": 3.0}, "'beat' whose number is not a whole number"),
        ({"lag_s": float("nan")}, "'beat' whose lag_s is not a finite number"),
        ({"lag_s": 10**400}, "'beat' whose lag_s is not a finite number"),
        ({"busy": 1}, "'beat' whose busy is not true or false"),
        ({"reason": "why"}, "'beat' whose reason is not one of lost, swap"),
        ({"who": 7}, "'beat' whose who is not a text"),
        ({"places": {}}, "'beat' whose places is not a list"),
        ({"places": [{"node": "n1"}, {"node": 1}]}, "'beat' whose places.1.node is not a text"),
        ({"places": [{}]}, "'beat' whose places.0.node is not there"),
        ({"seen": {"n2": "now"}}, "'beat' whose seen.n2 is not a finite number"),
        ({"kind": "goodbye"}, "of the unknown kind 'goodbye'"),
        ({"kind": ["beat"]}, "of the unknown kind"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], said: str) -> None:
    """Kind and field, which say what side has to be corrected."""
    with pytest.raises(ProtocolError, match="a message ") as error:
        CODEC.decode(RAW | change)
    assert said in str(error.value)


def test_a_missing_field_is_named() -> None:
    """Unless it has a default."""
    with pytest.raises(ProtocolError, match="'beat' whose lag_s is not there"):
        CODEC.decode({name: value for name, value in RAW.items() if name != "lag_s"})


def test_what_a_dataclass_says_of_its_values_is_a_protocol_error() -> None:
    """Bounds are kept where the fields are declared."""

    @dataclass(frozen=True)
    class Count:
        of: int

        def __post_init__(self) -> None:
            if self.of < 0:
                raise ValueError("less than none")

    with pytest.raises(ProtocolError, match="'count' that makes no sense: less than none"):
        Codec((_local(Count),)).decode({"kind": "count", "of": -1})


def _local(cls: type) -> type:
    """Let the hints of a class within a function be found."""
    cls.__annotations__ = {"of": int}
    return cls


class Newer:
    """Messages of the next version: one field more, and one that has a default now is gone."""

    @dataclass(frozen=True, slots=True)
    class Beat:
        """As the next version has it."""

        number: int
        lag_s: float
        busy: bool
        reason: Reason
        places: tuple[Place, ...] = ()
        load: float = 0.0


def test_neighbouring_versions_understand_each_other() -> None:
    """Fields that one side does not know are ignored there; those that the other does not send have their default."""
    newer = Codec((Newer.Beat,))
    sent = newer.encode(Newer.Beat(1, 0.5, True, Reason.SWAP, load=2.0))
    assert CODEC.decode(sent) == Beat(1, 0.5, True, Reason.SWAP)
    sent = CODEC.encode(Beat(1, 0.5, True, Reason.SWAP, who="n2"))
    assert newer.decode(sent) == Newer.Beat(1, 0.5, True, Reason.SWAP)


@dataclass
class Changeable:
    number: int


@dataclass(frozen=True)
class WithSet:
    names: set[str]


@dataclass(frozen=True)
class WithKind:
    kind: str


@pytest.mark.parametrize("kinds", [(Changeable,), (WithSet,), (WithKind,), (int,), (Beat, Newer.Beat)])
def test_what_cannot_be_a_message_is_refused_when_the_codec_is_made(kinds: tuple[type, ...]) -> None:
    """A mistake of ours is seen at once, and not by the neighbour."""
    with pytest.raises(TypeError):
        Codec(kinds)


@dataclass(frozen=True)
class Renamed:
    """Sent under the names that it had before."""

    wire: ClassVar[str] = "before"
    new: int = field(metadata=wire_name("old"))


def test_a_renamed_message_keeps_its_names_between_launchers() -> None:
    codec = Codec((Renamed,))
    assert codec.encode(Renamed(1)) == {"kind": "before", "old": 1}
    assert codec.decode({"kind": "before", "old": 1}) == Renamed(1)
    with pytest.raises(ProtocolError, match="whose old is not there"):
        codec.decode({"kind": "before"})


def test_the_table_says_what_each_message_is() -> None:
    """Name, direction, fields with their types (`=`: with a default), and the first sentence of what is said of it."""
    beat, go_on = rows((Beat, GoOn))
    assert beat == (
        "`beat`", "all to all",
        "`number`: int, `lag_s`: float, `busy`: bool, `reason`: `lost` or `swap`, `who`=: str, or null, "
        "`places`=: list of {node: str, ranks: list of int}, `seen`=: object of float, `note`=: JSON",
        "The sender is there, and what it sees.",
    )  # fmt: skip
    assert go_on == ("`go_on`", "", "", "Nothing else.")


# What launchers send each other: frames that arrive whole and cannot be tampered with.


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


# How much a launcher may say.


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_said_for_good_has_a_limit_and_a_burst_has_a_greater_one() -> None:
    """What was kept for a launcher that was stopped may come at once; somebody who goes on like that is cut."""
    clock = Clock()
    rate_limit = RateLimit(clock)
    rate_limit.spend(int(MESSAGES_PER_S * PATIENCE_S), 0)
    with pytest.raises(WireError, match="says more than 1000 messages or 16 MB a second"):
        rate_limit.spend(1, 0)
    for _ in range(100):
        clock.now += 0.1
        rate_limit.spend(int(MESSAGES_PER_S * 0.1) - 1, int(BYTES_PER_S * 0.1))


def test_few_large_messages_count_as_well() -> None:
    """By their bytes."""
    rate_limit = RateLimit(Clock())
    with pytest.raises(WireError):
        for _ in range(1000):
            rate_limit.spend(1, 8 << 20)
