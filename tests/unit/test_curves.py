"""The course of a run: thinned curves from the lines about its steps."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from opsd.ledger.for_user import NAMES, curves, records_for_user

ANYTHING = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3) | st.lists(st.none())


def line(t: float, **values: Any) -> dict[str, Any]:
    return {"t": t, "step": 1, "generation": 1, **values}


def test_a_long_run_is_a_few_hundred_points() -> None:
    """The mean of the steps around each; first and last remain near the ends."""
    found = curves([line(t, loss=10.0 - t / 1000, step_s=0.5) for t in range(10_000)], points=100)
    assert len(found["loss"]) == 100 and "tokens_per_s" not in found
    assert {value for _, value in found["step_s"]} == {0.5}
    assert found["loss"][0][0] < 100 and found["loss"][-1][0] > 9_900
    assert all(math.isclose(value, 10.0 - at / 1000) for at, value in found["loss"])


def test_a_line_of_several_steps_counts_by_the_step() -> None:
    """steps.jsonl has the steps of ten seconds in one line."""
    assert curves([line(1, step_s=10.0, steps=20), line(2, step_s=6.0, steps=10)])["step_s"] == [(1.0, 0.5), (2.0, 0.6)]


def test_what_diverged_is_a_gap_and_no_number() -> None:
    """The trainer writes null for a loss that is not finite."""
    found = curves([line(1, loss=2.0), line(2, loss=None), line(3, loss=math.inf), line(4, loss=3.0)])
    assert found == {"loss": [(1.0, 2.0), (4.0, 3.0)]}


@given(st.lists(st.dictionaries(st.sampled_from(["t", "steps", *NAMES]), ANYTHING), max_size=30), st.integers(1, 9))
def test_any_lines_become_finite_points(lines: list[dict[str, Any]], points: int) -> None:
    """The file is a user's: no value in it breaks the page. At most as many points as asked for, in order."""
    for curve in curves(lines, points).values():
        assert len(curve) <= points or points < 2
        assert all(math.isfinite(at) and math.isfinite(value) for at, value in curve)
        assert curve == sorted(curve, key=lambda point: point[0])


def test_they_come_with_the_ledger_of_the_run(tmp_path: Path) -> None:
    """Read once, with the rights of the run's user."""
    events = [{"t": 1.0, "event": "generation_started", "generation": 1}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line(2.0 + t, loss=1.0, step_s=1.0)) + "\n" for t in range(3))
    )
    told = records_for_user(tmp_path, os.getuid())
    assert told["steps"] == 3 and told["curves"]["loss"] == [(2.0, 1.0), (3.0, 1.0), (4.0, 1.0)]
