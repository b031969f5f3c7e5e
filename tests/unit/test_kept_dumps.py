"""What is kept of flight recorder dumps has a most, of which each user has a part."""

from __future__ import annotations

import pytest

from opsd.collectors.lib.nccl.flight_recorder import Call, Dump, DumpError
from opsd.collectors.lib.nccl.run import KeptDumps
from opsd.collectors.lib.shares import Room

CALL = Call("0", "x", 7, "nccl:all_reduce", 7, 7, 1)
MIB = 1 << 20


def dump(calls: int = 0, ranks: int = 0, first: int = 0) -> Dump:
    """So many calls, and a group of so many ranks."""
    return Dump((CALL,) * calls, {"0": 7}, {"0": tuple(range(first, first + ranks))}, 0)


def test_groups_that_dumps_have_in_common_are_kept_once() -> None:
    """Each of 4,096 ranks lists all of them: 40 bytes each would be 640 MiB."""
    kept = KeptDumps(1, Room(16 * MIB))
    for rank in range(4_096):
        kept.keep(rank, 1.0, dump(ranks=4_096))
    assert len({id(one.members["0"]) for _, one in kept.of_rank.values()}) == 1
    assert kept.held < 8 * MIB


def test_groups_that_differ_count_each() -> None:
    """24 dumps of 1.3 MB, each with other ranks, left 240 MiB in the agent."""
    kept = KeptDumps(1, Room(48 * MIB))
    with pytest.raises(DumpError, match="no room left"):
        for rank in range(24):
            kept.keep(rank, 1.0, dump(ranks=1 << 18, first=rank))
    assert 0 < len(kept.of_rank) < 3


def test_what_is_forgotten_or_replaced_makes_room() -> None:
    """To the last byte, whatever dumps have in common."""
    kept = KeptDumps(1, Room(MIB))
    for turn in range(100):
        kept.keep(turn % 3, 1.0, dump(calls=50, ranks=1_000, first=turn % 2))
    for rank in range(4):
        kept.forget(rank)
    assert kept.held == 0 and kept.of_rank == {}


def test_users_leave_room_for_others() -> None:
    """Whatever they fill, the next one may have half of the rest, and all of them stay within the total."""
    room = Room(16 * MIB)
    users = [KeptDumps(user, room) for user in range(5)]
    for kept in users:
        with pytest.raises(DumpError):
            for rank in range(1_000):
                kept.keep(rank, 1.0, dump(calls=50))
    held = [kept.held for kept in users]
    assert sum(held) <= 16 * MIB
    assert all(one > 0.8 * 16 * MIB / 2**number for number, one in enumerate(held, 1))


def test_runs_of_a_user_share_and_those_that_are_gone_have_nothing() -> None:
    """A run folder that is removed takes its dumps along."""
    room = Room(MIB)
    first, second = KeptDumps(1, room), KeptDumps(1, room)
    first.keep(0, 1.0, dump(calls=400))
    with pytest.raises(DumpError):
        second.keep(0, 1.0, dump(calls=400))
    del first
    second.keep(0, 1.0, dump(calls=400))
