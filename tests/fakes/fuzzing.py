"""Input that nobody expects: a few hundred examples in every test run, ten thousand in the long ones.

A test gives its target and what went wrong once (``seeds``), which is tried first, every time::

    @AMOUNTS
    def test_no_event_is_a_bug(amount: int) -> None:
        fuzz(parse, json_lines(KEYS), amount, seeds=SEEDS)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

T = TypeVar("T")

FEW, MANY = 300, 10_000
AMOUNTS = pytest.mark.parametrize(
    "amount",
    [
        pytest.param(FEW, id="few"),
        pytest.param(MANY, id="many", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
"""The test gets ``amount``, the number of examples."""

NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"))
TEXTS = ("", "\0", "/", "..", "\ud800", "\u202e", "²", "\n# HELP x\n", '"}\\', "a" * 5000, "../../etc/shadow", "%s{0}")
PIECES = (b"", b"\0", b"\xff" * 8, b"\n", b"\r\n\r\n", b"\x80", b"\xed\xa0\x80", b"9" * 400, b"[" * 2000, b'{"', b"\\u")

numbers = st.sampled_from(NUMBERS) | st.integers() | st.floats()
texts = st.sampled_from(TEXTS) | st.text(max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
"""What JSON can hold, and what Python's writes and reads beyond it."""


def fuzz(target: Callable[[T], object], inputs: st.SearchStrategy[T], amount: int, seeds: Sequence[T] = ()) -> None:
    """Call ``target`` with the seeds and ``amount`` examples. The few are always the same, the many never."""

    def attempt(given_input: T) -> None:
        target(given_input)

    test = given(inputs)(attempt)
    for seed in seeds:
        test = example(seed)(test)
    settings(
        max_examples=amount,
        deadline=None,
        derandomize=amount <= FEW,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )(test)()


def changed(*originals: bytes) -> st.SearchStrategy[bytes]:
    """One of ``originals`` with up to four of its parts replaced, or anything at all."""
    piece = st.sampled_from(PIECES) | st.binary(max_size=8)
    edits = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 8), piece), max_size=4)
    edited = st.tuples(st.sampled_from(originals), edits).map(lambda drawn: _edit(*drawn))
    cut = st.tuples(st.sampled_from(originals), st.integers(0, 1 << 20)).map(lambda it: it[0][: it[1] % len(it[0])])
    return edited | cut | st.binary(max_size=300)


def _edit(original: bytes, edits: Sequence[tuple[int, int, bytes]]) -> bytes:
    content = original
    for place, length, piece in edits:
        at = place % (len(content) + 1)
        content = content[:at] + piece + content[at + length :]
    return content


def objects(usual: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """``usual`` with odd values, missing keys and keys that nobody knows."""
    changes = st.dictionaries(st.sampled_from(sorted(usual)) | texts, json_values, max_size=4)
    missing = st.sets(st.sampled_from(sorted(usual)), max_size=1)
    both = st.tuples(changes, missing)
    return both.map(lambda drawn: {key: value for key, value in (usual | drawn[0]).items() if key not in drawn[1]})


def encoded(value: object) -> bytes:
    """JSON as Python's own writes it, which other programs need not be able to read."""
    return json.dumps(value).encode()


def json_lines(*usual: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A line of JSON: an object much like one of ``usual``, any value, or a line that is damaged."""
    whole = st.one_of(*(objects(one) for one in usual)).map(encoded)
    return whole | json_values.map(encoded) | changed(*(encoded(one) for one in usual))
