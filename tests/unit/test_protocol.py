"""Messages as dataclasses: what is sent arrives as it was, and what is not as its kind says is refused by name."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.launch.io.protocol import Codec, ProtocolError, rows, wire_name


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
