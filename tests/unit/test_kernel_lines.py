"""Lines that real kernels and drivers have written, from outside this project, and the incidents that they open."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.agent.window import Window
from opsd.bench.outside import FOLDER
from opsd.bench.outside.kernel_lines import INCIDENTS, REPEATED, expected, lines
from opsd.collectors.kmsg import parse_message
from opsd.runbooks import RUNBOOKS
from tests.fakes.kmsg import Node, read

LINES = list(lines(FOLDER / "kernel_lines"))


def opened(node: Node, line: str, *, times: int = 1, apart_s: float = 70.0, facility: int = 0) -> set[str]:
    """The kinds of incident that the agent's runbooks find 20 s after the kernel has said ``line``."""
    agent, window = node.agent(), Window("n01", seconds=60.0)
    read(agent)
    for _ in range(times):
        node.clock.advance(apart_s)
        node.say(line, facility=facility)
        window.begin(node.clock.monotonic(), node.clock.wall())
        window.add("kmsg", read(agent))
    window.begin(node.clock.monotonic() + 20.0, node.clock.wall() + 20.0)
    return {book.kind for book in RUNBOOKS if any(book.detect(window))}


def test_every_kind_of_trouble_has_lines_from_several_places() -> None:
    """None of them is tested with our own words only."""
    assert {about for about, _ in LINES} == {*INCIDENTS, "benign", "harmless_event"}


@pytest.mark.parametrize(("about", "line"), [each for each in LINES if each[0] in INCIDENTS])
def test_a_line_of_trouble_opens_its_incident(tmp_path: Path, about: str, line: str) -> None:
    """Whatever release of the kernel or driver wrote it; storms take several."""
    times = REPEATED.get(about, 1)
    assert opened(Node(tmp_path), line, times=times, apart_s=70.0 if times < 10 else 1.0) == {expected(about, line)}


@pytest.mark.parametrize(("about", "line"), [each for each in LINES if each[0] not in INCIDENTS])
def test_a_line_that_looks_alike_opens_nothing(tmp_path: Path, about: str, line: str) -> None:
    """Lines that go with trouble or only resemble it are no incident; most are not even an event."""
    assert (parse_message(line) is None) == (about == "benign")
    assert opened(Node(tmp_path), line) == set()


@pytest.mark.parametrize(("about", "line"), LINES)
def test_what_a_user_writes_into_the_log_is_not_believed(tmp_path: Path, about: str, line: str) -> None:
    """A process that may write to /dev/kmsg speaks with its own facility, never the kernel's."""
    assert opened(Node(tmp_path), line, facility=1) == set()
