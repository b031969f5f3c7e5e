"""Which run folders are looked at, whatever users put below the root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.lib.run_slots import MAX_PER_OWNER, MAX_RUNS, RunSlots
from opsd.collectors.lib.shares import Allowance, fill, fill_by_owner
from tests.fakes.clock import FakeClock

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to other users")


def lives(folder: Path, _owner: int) -> bool:
    """Folders called live-… live."""
    return folder.name.startswith("live")


def make(root: Path, *names: str, owner: int | None = None) -> None:
    for name in names:
        (root / name).mkdir()
        if owner is not None:
            os.chown(root / name, owner, owner)


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[RunSlots]:
    yield RunSlots(tmp_path, lives, clock=FakeClock().monotonic)


def names(slots: RunSlots, looks: int = 1) -> list[str]:
    for _ in range(looks):
        chosen = slots.look()
    return [folder.name for folder, _ in chosen]


def test_all_are_looked_at_where_there_is_room(tmp_path: Path, slots: RunSlots) -> None:
    """Those that have ended as well; what is no folder of a run, and what is gone, is not."""
    make(tmp_path, "a", "b", ".hidden")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert names(slots) == ["a", "b"]
    (tmp_path / "a").rmdir()
    assert names(slots) == ["b"]
    assert slots.left_out == 0


def test_what_lives_comes_first(tmp_path: Path, slots: RunSlots) -> None:
    """Once it was found out what does, and then for good, however many others are newer."""
    make(tmp_path, "live")
    os.utime(tmp_path / "live", (1, 1))
    make(tmp_path, *(f"job-{number:03d}" for number in range(MAX_RUNS + 20)))
    seen = [names(slots) for _ in range(100)]
    assert all(len(chosen) == MAX_RUNS for chosen in seen)
    first = next(number for number, chosen in enumerate(seen) if "live" in chosen)
    assert all("live" in chosen for chosen in seen[first:])
    assert slots.left_out == 0


def test_a_limit_that_bites_is_told(tmp_path: Path, slots: RunSlots) -> None:
    """Of more living runs than there are slots, those with a slot keep it."""
    make(tmp_path, *(f"live-{number:03d}" for number in range(MAX_RUNS)))
    first = names(slots, 5)
    make(tmp_path, *(f"job-{number:03d}" for number in range(3 * MAX_PER_OWNER)))
    assert names(slots, 20) == first


@needs_root
def test_what_has_ended_of_one_user_gives_way_to_what_lives_of_another(tmp_path: Path) -> None:
    """Each owner is within its own limit; all of them together are more than there are slots."""
    for owner in (1001, 1002):
        make(tmp_path, *(f"job-{owner}-{number:03d}" for number in range(MAX_PER_OWNER)), owner=owner)
    make(tmp_path, *(f"live-{number:03d}" for number in range(40)), owner=2000)
    slots = RunSlots(tmp_path, lives, clock=FakeClock().monotonic)
    assert sum(name.startswith("live") for name in names(slots, 20)) == 40
    assert slots.left_out == 0


@needs_root
def test_owners_share_the_slots_evenly(tmp_path: Path) -> None:
    """One who has many cannot leave another without; users of a GPU come first."""
    make(tmp_path, *(f"live-{number:03d}" for number in range(300)), owner=1001)
    for owner in (2000, 2001):
        make(tmp_path, f"live-z-{owner}", owner=owner)
    slots = RunSlots(tmp_path, lives, clock=FakeClock().monotonic)
    chosen = slots.look()
    assert len(chosen) == MAX_PER_OWNER
    assert {folder.name for folder, owner in chosen if owner != 1001} == {"live-z-2000", "live-z-2001"}
    assert slots.left_out == 2


@needs_root
def test_users_without_number_leave_those_who_use_gpus_their_slot(tmp_path: Path) -> None:
    """User namespaces give one user sixty thousand ids."""
    for number in range(200):
        make(tmp_path, f"live-{number:03d}", owner=100_000 + number)
    slots = RunSlots(tmp_path, lives, first=lambda: frozenset({500_000}), clock=FakeClock().monotonic)
    names(slots, 5)
    make(tmp_path, "live-zz", owner=500_000)
    assert "live-zz" in names(slots, 5)


@given(st.lists(st.integers(0, 50), max_size=10), st.integers(0, 100))
def test_shares_are_even(demands: list[int], total: int) -> None:
    """Nobody gets more than wanted, nothing is kept back, and who gets less than wanted gets as much as anybody."""
    given_out = fill(demands, total)
    assert all(0 <= share <= demand for share, demand in zip(given_out, demands, strict=True))
    assert sum(given_out) == min(total, sum(demands))
    short = [share for share, demand in zip(given_out, demands, strict=True) if share < demand]
    assert not short or min(short) >= max(given_out) - 1


def test_shares_are_those_of_owners() -> None:
    """Many runs give no more than one does."""
    assert fill_by_owner([(1, 100)] * 63 + [(2, 8)], 256)[-1] == 8


def test_an_allowance_comes_back_with_time() -> None:
    """Each user has an equal part of it; what one has spent is not another's."""
    allowance = Allowance(100, 10)
    allowance.begin(frozenset({1, 2}))
    assert allowance.take(1, 50, 0.0) and not allowance.take(1, 1, 0.0)
    assert allowance.take(2, 50, 0.0)
    assert not allowance.take(1, 6, 1.0) and allowance.take(1, 5, 1.0)
