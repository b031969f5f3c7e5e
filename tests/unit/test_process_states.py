"""Counting processes, however many there are and whatever they are called."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opsd.collectors.host import LOOK_S, PROCESS_STATES, ProcessStates
from tests.fakes.clock import FakeClock

names = st.sampled_from([b"a", b") Z 1", b"\n(x) D", b"\xff\r", b"((", b" "])


def processes(proc: Path, states: list[tuple[str, bytes]]) -> None:
    """Processes of these states and names, beside what else is in procfs."""
    (proc / "sys").mkdir(parents=True)
    for number, (letter, name) in enumerate(states, 1):
        (proc / str(number)).mkdir()
        (proc / str(number) / "stat").write_bytes(b"%d (%s) %s 1 1 1 0 -1" % (number, name, letter.encode()))


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from("RSDTtZIXK?"), names), max_size=40))
def test_every_process_is_in_exactly_one_state(states: list[tuple[str, bytes]]) -> None:
    """Whatever its name; unknown letters of future kernels are counted too."""
    with tempfile.TemporaryDirectory() as folder:
        processes(Path(folder), states)
        census = ProcessStates(Path(folder), FakeClock().monotonic)
        census.begin()
        found = census.go_on()
    assert found == {
        **{name: sum(letter == one for one, _ in states) for letter, name in PROCESS_STATES.items()},
        "other": sum(one not in PROCESS_STATES for one, _ in states),
    }


def test_hundreds_of_thousands_are_counted_a_part_at_a_time(tmp_path: Path) -> None:
    """A look that takes long enough ends; the last whole count is shown until there is another."""
    processes(tmp_path, [("S", b"sleep")] * 1000)
    census, looks = ProcessStates(tmp_path, slow()), 0
    census.begin()
    while not census.go_on():
        looks += 1
        census.begin()
    assert 4 <= looks <= 1000
    (tmp_path / "7/stat").unlink()
    census.begin()
    assert census.go_on()["sleeping"] == 1000
    assert any(census.go_on()["sleeping"] == 999 for _ in range(looks + 1))


def slow() -> Callable[[], float]:
    """A clock by which half of a look passes between two calls."""
    ticks = count()
    return lambda: next(ticks) * LOOK_S / 2
