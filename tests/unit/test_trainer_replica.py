"""Copies of states in the memory of another node: what is taken, and which state goes where after a loss."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import memory
from trainer.exchange import Save, moves, newest_whole
from trainer.memory import Record
from trainer.replica import Sending, serve

KEY, STATE = b"k" * 32, os.urandom(9_000_001)


def staged(content: bytes) -> mmap.mmap:
    state = mmap.mmap(-1, len(content))
    state[:] = content
    return state


def record_of(content: bytes, rank: int = 3, attempt: str = "0000abcd") -> Record:
    return Record(rank, 20, 80, "d", attempt, {"dp": 2}, len(content), memory.checksum(memoryview(content)), "run", 0.0)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    """Somebody who keeps the state of rank 3 in ``tmp_path``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with suppress(OSError):  # the end of the test
                serve(listener, KEY, tmp_path, 3, "0000abcd")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"127.0.0.1 {listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def send(target: str, record: Record, key: bytes = KEY, content: bytes = STATE) -> str:
    """Why the copy was not made."""
    sending = Sending(target, key, record, staged(content))
    sending.start()
    sending.join(30)
    assert not sending.is_alive()
    return sending.why


def test_a_copy_is_the_state(tmp_path: Path, target: str) -> None:
    """What arrives has the same bytes and the record says so; the next one takes its place."""
    for content in (STATE, STATE[::-1]):
        assert send(target, record_of(content), content=content) == ""
        assert memory.state_path(tmp_path, 3).read_bytes() == content
        assert memory.read_record(tmp_path, 3) == record_of(content)


@pytest.mark.parametrize(
    ("key", "record", "why"),
    [
        (b"x" * 32, record_of(STATE), "it is not of this run"),
        (KEY, record_of(STATE, rank=2), "it is of rank 2, not 3, or of another start"),
        (KEY, record_of(STATE, attempt="00000000"), "it is of rank 3, not 3, or of another start"),
        (KEY, record_of(STATE, attempt="0" * 70_000), ""),
    ],
)
def test_strangers_are_refused(tmp_path: Path, target: str, key: bytes, record: Record, why: str) -> None:
    """A wrong key, another rank, another start or an endless record changes nothing of what is kept."""
    assert send(target, record_of(STATE)) == ""
    assert why in send(target, record, key)
    assert memory.read_record(tmp_path, 3) == record_of(STATE)
    assert memory.state_path(tmp_path, 3).read_bytes() == STATE


def test_what_was_broken_off_is_no_copy(tmp_path: Path, target: str) -> None:
    """A sender that stops half way leaves no record, neither of the new state nor of the one before."""
    assert send(target, record_of(STATE)) == ""
    long = bytes(400_000_000)
    sending = Sending(target, KEY, record_of(long), staged(long))
    sending.start()
    deadline = time.monotonic() + 30
    while memory.record_path(tmp_path, 3).exists():
        assert time.monotonic() < deadline
    sending.stop()
    assert sending.why
    assert memory.read_record(tmp_path, 3) is None
    assert send(target, record_of(STATE)) == ""


def test_a_partner_that_is_gone_is_named(tmp_path: Path) -> None:
    """When nobody listens any more the reason names the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert send(f"127.0.0.1 {port}", record_of(STATE)) == "127.0.0.1: Connection refused"


SAVES = st.builds(Save, st.integers(1, 3), st.integers(1, 2))


@st.composite
def memories(draw: st.DrawFn) -> tuple[list[dict[int, Save]], int, int]:
    nodes, local_size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    size = nodes * local_size
    states = st.dictionaries(st.integers(0, size - 1), SAVES)
    return [draw(states) for _ in range(nodes)], local_size, size


@given(memories())
def test_moves_bring_every_rank_its_state(world: tuple[list[dict[int, Save]], int, int]) -> None:
    """The newest save that is whole is chosen, and after the moves each node has the states of all its ranks in it."""
    held, local_size, size = world
    whole = [
        save
        for save in {save for states in held for save in states.values()}
        if all(any(states.get(rank) == save for states in held) for rank in range(size))
    ]
    save = newest_whole(held, size)
    assert save == max(whole, default=None)
    if save is None:
        return
    after = [dict(states) for states in held]
    for move in moves(held, local_size, size, save):
        assert held[move.source // local_size][move.rank] == save
        assert move.source // local_size != move.rank // local_size
        after[move.rank // local_size][move.rank] = save
    assert all(after[rank // local_size][rank] == save for rank in range(size))


def test_a_lost_node_gets_its_states_from_the_next() -> None:
    """Two ranks on each of three nodes, each node with a copy of the one before it; the second is replaced."""
    save = Save(80, 7)
    held = [dict.fromkeys(ranks, save) for ranks in ((0, 1, 4, 5), (), (4, 5, 2, 3))]
    assert newest_whole(held, 6) == save
    assert [(move.rank, move.source) for move in moves(held, 2, 6, save)] == [(2, 4), (3, 5)]
