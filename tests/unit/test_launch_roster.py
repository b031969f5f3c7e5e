"""Launchers that nobody has listed find each other, and only one of them reads the files of all."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from opsd.launch.io.protocol import Member
from opsd.launch.run.launchers import Launchers
from opsd.launch.run.rendezvous import BEAT_S, FOLDER, Meeting, RendezvousOptions
from opsd.launch.run.roster import FOLDER as ROSTER
from opsd.launch.run.roster import SILENT_S, Roster, SharedRoster

START = "r, at n0:29400"


def member(number: int, port: int = 29_480) -> Member:
    return Member(f"n{number}", f"127.0.0.{number + 1}", port)


def meeting(folder: Path, own: Member, least: int, most: int, last_call_s: float = 0.0) -> Meeting:
    return Meeting(RendezvousOptions("n0", 29_400, least, most, None, ""), folder, own, last_call_s, start=START)


class Nodes:
    """Launchers that take their steps in turn, under a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0

    def go(self, meetings: Sequence[Meeting], seconds: float) -> list[Launchers | None]:
        """What each has found within ``seconds``; who has found it takes no more steps."""
        found: list[Launchers | None] = [None] * len(meetings)
        until = self.now + seconds
        while self.now < until and None in found:
            found = [known or one.step(self.now) for known, one in zip(found, meetings, strict=True)]
            self.now += BEAT_S
        return found


def test_all_find_the_same_launchers(tmp_path: Path) -> None:
    """Each in the same order, itself among them, with one author of one roster."""
    everybody = [member(number) for number in range(20)]
    found = Nodes().go([meeting(tmp_path, own, 20, 20) for own in everybody], 10)
    assert [known and known.own for known in found] == everybody
    assert {known and known.members for known in found} == {tuple(sorted(everybody, key=lambda one: one.name))}
    assert [path.name for path in (tmp_path / FOLDER / ROSTER).iterdir()] == ["1.json.gz"]


def test_only_the_author_reads_the_files_of_the_others(tmp_path: Path) -> None:
    """The others find everybody without those files."""
    author, other = (meeting(tmp_path, member(number), 2, 2) for number in range(2))
    nodes = Nodes()
    while author.step(nodes.now) is None:
        assert other.step(nodes.now) is None
        nodes.now += BEAT_S
    for path in (tmp_path / FOLDER).glob("*.json"):
        path.unlink()
    (found,) = nodes.go([other], 5)
    assert found is not None and found.members == (member(0), member(1))


def test_each_look_for_a_roster_follows_a_change_in_its_folder(tmp_path: Path) -> None:
    """Otherwise an NFS client may show the folder as it was, without the roster that another node has made."""
    author, other = (meeting(tmp_path, member(number), 3, 3) for number in range(2))
    folder = tmp_path / FOLDER / ROSTER
    for one in (author, other, other):
        os.utime(folder, (0, 0))
        assert one.step(0.0) is None
        assert folder.stat().st_mtime != 0


def test_who_takes_over_from_a_silent_author(tmp_path: Path) -> None:
    """One of the others, after ``SILENT_S``; before the author has listed anybody, and after."""
    first, *others = (meeting(tmp_path, member(number), 3, 4, last_call_s=5.0) for number in range(3))
    nodes = Nodes()
    assert first.step(nodes.now) is None
    assert nodes.go(others, SILENT_S + 2) == [None, None], "one is missing"
    others.append(meeting(tmp_path, member(3), 3, 4))
    found = nodes.go(others, 10)
    assert {known and known.members for known in found} == {(member(1), member(2), member(3))}
    assert sorted(path.name for path in (tmp_path / FOLDER / ROSTER).iterdir()) == ["1.json.gz", "2.json.gz"]


def test_a_roster_left_over_is_not_used(tmp_path: Path) -> None:
    """That of an earlier start, whose launchers have ended: those that come find each other, not those of before."""
    nodes = Nodes()
    assert None not in nodes.go([meeting(tmp_path, member(number), 2, 2) for number in range(2)], 10)
    found = nodes.go([meeting(tmp_path, member(number, port=5), 2, 2) for number in (1, 2)], 10)
    assert {known and known.members for known in found} == {(member(1, port=5), member(2, port=5))}


def test_a_roster_with_an_earlier_launcher_of_this_node_is_not_used(tmp_path: Path) -> None:
    """It still beats, as the author lingers: the new launchers of the same nodes make one of their own."""
    nodes = Nodes()
    before = [meeting(tmp_path, member(number), 2, 2) for number in range(2)]
    assert None not in nodes.go(before, 10)
    again = [meeting(tmp_path, member(number, port=5), 2, 2) for number in range(2)]
    assert nodes.go(again, BEAT_S) == [None, None]
    assert before[0].beats, "the author and its presence"
    for beat in before[0].beats[1:]:
        beat()
    found = nodes.go(again, 10)
    assert {known and known.members for known in found} == {(member(0, port=5), member(1, port=5))}


def test_who_comes_late_joins_those_that_were_listed(tmp_path: Path) -> None:
    """While the author lingers, and no generation is claimed yet."""
    nodes = Nodes()
    early = [meeting(tmp_path, member(number), 2, 2) for number in range(2)]
    assert None not in nodes.go(early, 10)
    late = meeting(tmp_path, member(2), 2, 2)
    assert late.step(nodes.now) is None
    for beat in early[0].beats:
        beat()
    found = late.step(nodes.now + BEAT_S)
    assert found is not None and found.members == (member(0), member(1), member(2))


def test_the_last_call_waits_for_more_and_ends(tmp_path: Path) -> None:
    """With the least number there, spares may come until it is over."""
    nodes = Nodes()
    meetings = [meeting(tmp_path, member(number), 2, 4, last_call_s=3.0) for number in range(2)]
    assert nodes.go(meetings, 3.0) == [None, None]
    found = nodes.go(meetings, 5.0)
    assert {known and known.members for known in found} == {(member(0), member(1))}


def roster_of(folder: Path, members: Sequence[Member]) -> Path:
    """The file in which ``members`` are listed."""
    rosters = folder / ROSTER
    rosters.mkdir(parents=True)
    shared = SharedRoster(folder, members[0])
    assert shared.is_author(0.0)
    shared.write(len(members), members)
    (path,) = rosters.iterdir()
    return path


@pytest.mark.parametrize(
    "members",
    [
        [Member("n9", "10.0.0.9", 1), Member("n10", "10.0.0.9", 2), Member("n2", "10.0.0.2", 1)],
        [Member("a", "fe80::1%eth0", 1), Member("b1", "fe80::2%eth0", 65_535)],
        [Member("n1", "no address", 1), Member("n2", "x[1", 1), Member("n3", "y,z", 1), Member("n4", "", 1)],
    ],
    ids=["order", "IPv6", "unusual"],
)
def test_a_roster_lists_whoever_came(tmp_path: Path, members: list[Member]) -> None:
    """In their order, whatever a user gave as an address."""
    roster = Roster.read(roster_of(tmp_path, members))
    assert roster is not None
    assert roster.members == tuple(members)


def test_a_roster_of_thousands_is_short(tmp_path: Path) -> None:
    """All of them read it at once: at most three bytes for each, which are those of ports that nobody chose."""
    everybody = [Member(f"n{k:05d}", f"10.0.{k >> 8}.{k & 255}", 32_768 + k * 7919 % 28_000) for k in range(4096)]
    path = roster_of(tmp_path, everybody)
    assert path.stat().st_size < 3 * len(everybody)
    roster = Roster.read(path)
    assert roster is not None
    assert roster.members == tuple(everybody)


@pytest.mark.parametrize("damage", ["cut off", "not gzip", "not JSON", "columns of other lengths"])
def test_a_damaged_roster_is_none(tmp_path: Path, damage: str) -> None:
    """Whoever reads it goes on as if it did not change."""
    path = roster_of(tmp_path, [member(0), member(1)])
    whole = path.read_bytes()
    content = {
        "cut off": whole[:-12],
        "not gzip": gzip.decompress(whole),
        "not JSON": gzip.compress(b"{"),
        "columns of other lengths": gzip.compress(gzip.decompress(whole).replace(b"n[0-1]", b"n[0-2]")),
    }[damage]
    assert content != whole
    path.write_bytes(content)
    assert Roster.read(path) is None
