"""Processes of containers by their numbers on this machine, in a procfs of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from opsd.collectors.lib.host_pids import MAX_ALIKE, RENEW_S, SEARCH_S, HostPids
from tests.fakes.clock import FakeClock

ADA, BOB = 1001, 1002
Add = Callable[..., None]


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    folder.mkdir()
    return folder


@pytest.fixture
def add(proc: Path) -> Add:
    """Adds a process with its numbers from outside to inside, in the container ``of``."""

    def add(*numbers: int, user: int = ADA, start: int = 100, of: str = "") -> None:
        folder = proc / str(numbers[0])
        (folder / "ns").mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(f"{numbers[0]} (py) R {' 0' * 18} {start} 0")
        listed = "\t".join(map(str, numbers))
        (folder / "status").write_text(f"Name:\tpy\nUid:\t{user}\t{user}\t{user}\t{user}\nNSpid:\t{listed}\n")
        if os.geteuid() == 0:
            os.chown(folder, user, user)
        namespace = proc.parent / f"namespace-{of}"
        namespace.touch()
        if not (folder / "ns/pid").exists():
            (folder / "ns/pid").symlink_to(namespace)

    return add


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def host(proc: Path, clock: FakeClock) -> HostPids:
    return HostPids(proc, clock=clock.monotonic)


def test_a_process_has_its_own_number_without_a_container(add: Add, host: HostPids) -> None:
    """Only the one that began then."""
    add(70)
    assert host.find(ADA, 70, 100) == 70
    assert host.find(ADA, 70, 101) is None


def test_a_process_of_a_container_is_found_by_its_number_inside(add: Add, host: HostPids) -> None:
    """Whose number may also be that of another process here, of another container, or of another user's."""
    add(7, start=1)
    add(70, 7, of="a")
    add(80, 3, 7, start=200, of="b")
    add(90, 7, user=BOB, of="c")
    assert [host.find(ADA, 7, 100), host.find(ADA, 7, 200), host.find(BOB, 7, 100)] == [70, 80, 90]
    assert host.find(BOB, 7, 200) is None


def test_what_was_searched_for_in_vain_is_not_searched_for_again(
    add: Add, host: HostPids, clock: FakeClock, proc: Path
) -> None:
    """A page outlives its process; and what ends is gone at once."""
    add(70, 7, of="a")
    assert (host.find(ADA, 7, 100), host.find(ADA, 8, 100)) == (70, None)
    clock.advance(SEARCH_S)
    assert host.find(ADA, 8, 100) is None
    add(80, 8, of="a")
    clock.advance(SEARCH_S)
    assert host.find(ADA, 8, 100) is None
    (proc / "70/stat").unlink()
    assert host.find(ADA, 7, 100) is None


def test_processes_that_begin_later_are_found_in_the_next_search(add: Add, host: HostPids, clock: FakeClock) -> None:
    """There is one search in a second, whoever asks for what."""
    assert host.find(ADA, 7, 100) is None
    add(80, 8, of="a")
    assert host.find(ADA, 8, 100) is None
    clock.advance(SEARCH_S)
    assert host.find(ADA, 8, 100) == 80


def test_helpers_are_those_of_the_same_container(add: Add, host: HostPids, clock: FakeClock) -> None:
    """The same numbers exist in each of them, and are used again after a while."""
    add(70, 7, of="a")
    add(71, 9, of="a")
    add(81, 9, of="b")
    assert host.beside(ADA, 70, 9) == 71
    assert host.beside(BOB, 70, 9) is None
    add(71, 9, start=300, of="a")
    assert host.beside(ADA, 70, 9) is None
    clock.advance(RENEW_S)
    assert host.beside(ADA, 70, 9) == 71
    assert host.beside(ADA, 12345, 9) is None


class LookClock(FakeClock):
    """Time passes with each question, so that a look ends after a few processes."""

    def monotonic(self) -> float:
        self.now += 0.001
        return self.now


def test_any_number_of_processes_is_searched_a_part_at_a_time(add: Add, proc: Path) -> None:
    """100,000 took 2 s of each second, in which the agent saw no run of anybody."""
    clock = LookClock()
    host = HostPids(proc, clock=clock.monotonic, look_s=0.01)
    for number in range(100, 200):
        add(number, 7, start=number, of="a")
    before, looks = clock.now, 0
    while host.find(ADA, 7, 199) != 199:
        looks += 1
        assert looks < 100
        assert clock.now - before < 0.05
        clock.advance(SEARCH_S)
        before = clock.now
    assert looks >= 1
    assert host.find(ADA, 8, 1) is None


def test_what_is_asked_for_is_found_among_any_number_of_its_kind(add: Add, host: HostPids) -> None:
    """A search does not remember all of those that nobody has asked for."""
    for number in range(2 * MAX_ALIKE):
        add(1000 + number, 7, start=number, of="a")
    assert [host.find(ADA, 7, number) for number in (2 * MAX_ALIKE - 1,)] == [1000 + 2 * MAX_ALIKE - 1]
