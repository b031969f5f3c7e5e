"""Where the reader of the kernel log stands: kept over restarts, worthless after a boot; and how events are dated."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.base import Reading
from tests.fakes.kmsg import XID_31, XID_79, Node, codes, read, values


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_first_start_passes_over_what_is_there(node: Node) -> None:
    """Installed on a running node, the agent does not take weeks of old errors for new ones."""
    node.say(XID_79)
    agent = node.agent()
    assert codes(read(agent)) == []
    node.say(XID_31)
    assert codes(read(agent)) == [31]


def test_a_restart_neither_repeats_nor_misses(node: Node) -> None:
    """After a restart old Xids stay old, and one that came meanwhile is reported with the time it happened."""
    agent = node.agent()
    node.say("hello")
    read(agent)
    node.say(XID_31)
    assert codes(read(agent)) == [31]
    node.clock.advance(10)
    node.say(XID_79)
    node.clock.advance(50)
    reading = read(node.agent())
    assert [(event.data["code"], event.at) for event in reading.events] == [(79, 50_010.0)]


def test_after_a_reboot_the_whole_log_is_news(node: Node) -> None:
    """The position of another boot is worth nothing, and errors while booting are reported."""
    agent = node.agent()
    for _ in range(5):
        node.say("hello")
    read(agent)
    node.boot()
    node.say(XID_79)
    assert codes(read(node.agent())) == [79]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"boot_id": "boot-1"}', '{"boot_id": "boot-1", "sequence": null}'])
def test_a_damaged_position_is_a_first_start(node: Node, content: str) -> None:
    """A position file that makes no sense replays nothing and is written again."""
    node.say(XID_79)
    node.state.write_text(content)
    assert codes(read(node.agent())) == []
    node.say(XID_31)
    assert codes(read(node.agent())) == [31]


def test_a_position_that_cannot_be_kept_is_visible(node: Node) -> None:
    """A state folder that cannot be written blinds nobody and shows in a metric and in the collector's state."""
    node.state = node.folder / "missing" / "kmsg.json"
    agent = node.agent()
    node.say("hello")
    read(agent)
    node.say(XID_31)
    reading = read(agent)
    assert codes(reading) == [31]
    assert values(reading, "opsd_kmsg_position_kept") == {(): 0}
    assert isinstance(reading, Reading) and reading.limited.endswith("cannot be written: No such file or directory")
    node.state.parent.mkdir()
    node.say("hello")
    assert values(read(agent), "opsd_kmsg_position_kept") == {(): 1}


def test_a_planted_link_is_not_followed(node: Node) -> None:
    """The position is written beside its place and renamed; a link planted there is replaced, its target untouched."""
    target = node.folder / "target"
    target.write_text("precious")
    (node.folder / ".kmsg.json.new").symlink_to(target)
    agent = node.agent()
    read(agent)
    node.say("hello")
    assert values(read(agent), "opsd_kmsg_position_kept") == {(): 1}
    assert target.read_text() == "precious"


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=20), limit=st.integers(1, 4))
def test_any_mix_of_restarts_reports_everything_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, int]], limit: int
) -> None:
    """However reading and restarting alternate, each Xid is reported exactly once and in order."""
    node = Node(tmp_path_factory.mktemp("node"))
    agent, said = node.agent(max_records=limit), 0
    seen: list[object] = []
    read(agent)
    node.say("hello")
    read(agent)
    for restart, messages in steps:
        for _ in range(messages):
            node.say(f"NVRM: Xid (PCI:0000:3b:00): {said}, pid={said}, name=x, y")
            said += 1
        if restart:
            agent = node.agent(max_records=limit)
        seen += codes(read(agent))
    for _ in range(said + 1):
        seen += codes(read(agent))
    assert seen == list(range(said))


def test_a_live_event_is_not_older_than_the_last_look(node: Node) -> None:
    """The log's clock drifts from the machine's; an event is dated between the last look and now, whatever it says."""
    agent = node.agent()
    read(agent)
    node.clock.advance(1)
    node.say(XID_31, seconds=700.0)
    node.say(XID_79, seconds=1300.0)
    assert [event.at for event in read(agent).events] == [50_000.0, 50_001.0]


def test_a_clock_stepped_by_an_hour_moves_events_with_it(node: Node) -> None:
    """Events are dated by the wall clock of the moment they are read."""
    agent = node.agent()
    read(agent)
    node.clock.wall_now += 3600
    node.say(XID_31)
    (event,) = read(agent).events
    assert event.at == node.clock.wall()
