"""Evaluations as series: the newest that has results, whatever a user has written into it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import Event
from opsd.collectors.lib.rank_series import MAX_NAMES, evaluations


def evaluation(**data: Any) -> Event:
    return Event("evaluation", 0.0, "an evaluation", {"step": 200, "tokens": 1_000_000, **data})


def series(*events: Event) -> dict[tuple[str, ...], float]:
    newest = evaluations("r")
    for event in events:
        newest.note(event)
    return {(sample.metric.name, *sample.labels): sample.value for sample in newest.samples()}


def test_the_newest_evaluation_is_exported_beside_the_reference() -> None:
    """Results by their names; other events change nothing."""
    old = evaluation(step=100, results={"loss": 3.0, "arc": 0.2})
    new = evaluation(results={"loss": 2.5}, reference={"loss": 2.4})
    assert series(old, new, Event("resumed", 0.0, "")) == {
        ("opsd_evaluation_step", "r"): 200.0,
        ("opsd_evaluation_tokens", "r"): 1_000_000.0,
        ("opsd_evaluation_result", "r", "loss"): 2.5,
        ("opsd_evaluation_reference", "r", "loss"): 2.4,
    }


def test_an_evaluation_that_failed_does_not_take_the_last_one_away() -> None:
    """What is known of the run is still known."""
    good = evaluation(results={"loss": 2.5})
    assert series(good, evaluation(step=300, tokens=None, results={}, why="no data")) == series(good)
    assert series() == {}


def test_the_number_of_series_is_bounded() -> None:
    """A user cannot flood Prometheus with names."""
    many = evaluation(results={f"task-{number}": 0.5 for number in range(10_000)} | {"x" * 1000: 1.0})
    assert len(series(many)) == 2 + MAX_NAMES


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["step", "tokens", "results", "reference"]), json_values))
def test_nothing_that_a_user_writes_breaks_it(data: dict[str, Any]) -> None:
    """Any JSON in any place; what is no number is no sample."""
    assert all(isinstance(value, float) for value in series(evaluation(**data)).values())
