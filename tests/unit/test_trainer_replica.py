"""Copies of states in the memory of another node, and passes that are compared."""

from __future__ import annotations

import hmac
import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.trainer import memory
from opsd.trainer.exchange import Save, newest_whole, plan_transfers
from opsd.trainer.memory import StateInfo
from opsd.trainer.replay import Difference, judge, suspects
from opsd.trainer.replica import ATTEMPTS, MAX_PER_ADDRESS, MAX_UNAUTHENTICATED, Receiver, Sender

# Copies of states in the memory of another node: what is taken, and which state goes where after a loss.


KEY, STATE = b"k" * 32, os.urandom(9_000_001)


def staged(content: bytes) -> mmap.mmap:
    state = mmap.mmap(-1, len(content))
    state[:] = content
    return state


def record_of(content: bytes, rank: int = 3, attempt: str = "0000abcd") -> StateInfo:
    return StateInfo(
        rank, 20, 80, "d", attempt, {"dp": 2}, len(content), memory.checksum(memoryview(content)), "run", 0.0
    )


@contextmanager
def keeping(folder: Path, **limits: float) -> Iterator[str]:
    """Somebody who keeps the state of rank 3 in ``folder``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        keeper = Receiver(KEY, folder, 3, "0000abcd", **limits)
        thread = threading.Thread(target=keeper.serve, args=(listener,), daemon=True)
        thread.start()
        yield f"127.0.0.1 {listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    """The same, with the limits that hold."""
    with keeping(tmp_path) as target:
        yield target


def send(target: str, info: StateInfo, key: bytes = KEY, content: bytes = STATE) -> str:
    """Why the copy was not made."""
    sending = Sender(target, key, info, staged(content))
    sending.start()
    sending.join(30)
    assert not sending.is_alive()
    return sending.why


def test_a_copy_is_the_state(tmp_path: Path, target: str) -> None:
    """What arrives has the same bytes and the record says so; the next one takes its place."""
    for content in (STATE, STATE[::-1]):
        assert send(target, record_of(content), content=content) == ""
        assert memory.state_path(tmp_path, 3).read_bytes() == content
        assert memory.read_info(tmp_path, 3) == record_of(content)


@pytest.mark.parametrize(
    ("key", "info", "why"),
    [
        (b"x" * 32, record_of(STATE), "it is not of this run"),
        (KEY, record_of(STATE, rank=2), "it is of rank 2, not 3, or of another start"),
        (KEY, record_of(STATE, attempt="00000000"), "it is of rank 3, not 3, or of another start"),
        (KEY, record_of(STATE, attempt="0" * 70_000), ""),
    ],
)
def test_others_are_refused(tmp_path: Path, target: str, key: bytes, info: StateInfo, why: str) -> None:
    """A wrong key, another rank, another start or an endless record changes nothing of what is kept."""
    assert send(target, record_of(STATE)) == ""
    assert why in send(target, info, key)
    assert memory.read_info(tmp_path, 3) == record_of(STATE)
    assert memory.state_path(tmp_path, 3).read_bytes() == STATE


def test_what_was_broken_off_is_no_copy(tmp_path: Path, target: str) -> None:
    """A sender that stops half way leaves no record, neither of the new state nor of the one before."""
    assert send(target, record_of(STATE)) == ""
    long = bytes(400_000_000)
    sending = Sender(target, KEY, record_of(long), staged(long))
    sending.start()
    deadline = time.monotonic() + 30
    while memory.info_path(tmp_path, 3).exists():
        assert time.monotonic() < deadline
    sending.stop()
    assert sending.why
    assert memory.read_info(tmp_path, 3) is None
    assert send(target, record_of(STATE)) == ""


def test_a_partner_that_is_gone_is_named(tmp_path: Path) -> None:
    """When nobody listens any more the reason names the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert send(f"127.0.0.1 {port}", record_of(STATE)) == "127.0.0.1: Connection refused"


def connect(target: str) -> socket.socket:
    host, port = target.split()
    return socket.create_connection((host, int(port)), timeout=20)


def is_cut_off(client: socket.socket) -> bool:
    """Waits for it."""
    try:
        while client.recv(1 << 10):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def first_bytes(content: bytes) -> bytes:
    """The beginning of what a sender says, which promises a record."""
    return (1000).to_bytes(4, "big") + content


STRANGE = {
    "silent": lambda client: None,
    "half a greeting": lambda client: client.sendall(first_bytes(b"{")),
    "half a length": lambda client: client.sendall(b"\0\0"),
    "another protocol": lambda client: client.sendall(b"GET / HTTP/1.1\r\n\r\n"),
}


@pytest.mark.parametrize("say", STRANGE.values(), ids=STRANGE.keys())
def test_an_unauthenticated_client_delays_nobody(tmp_path: Path, say: Callable[[socket.socket], None]) -> None:
    """A connection that says nothing, or not enough, does not keep the partner waiting, however long it stays."""
    with keeping(tmp_path, authentication_timeout_s=9999.0) as target, connect(target) as client:
        say(client)
        assert send(target, record_of(STATE)) == ""
        assert memory.read_info(tmp_path, 3) == record_of(STATE)


@pytest.mark.parametrize("say", STRANGE.values(), ids=STRANGE.keys())
def test_an_unauthenticated_client_is_cut_off(target: str, say: Callable[[socket.socket], None]) -> None:
    """It need not go by itself."""
    with connect(target) as client:
        say(client)
        assert is_cut_off(client)


def test_one_that_trickles_is_cut_off(target: str) -> None:
    """Two seconds are for the whole proof, not for each byte of it."""
    with connect(target) as client:
        client.sendall(first_bytes(b""))
        began = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - began < 20:
                client.sendall(b"x")
                time.sleep(0.2)
        assert time.monotonic() - began < 20


def test_many_unauthenticated_clients_take_few_descriptors(tmp_path: Path, target: str) -> None:
    """Three hundred idle connections of one address hold four descriptors, and the partner comes in between them."""
    clients = []
    try:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(300):
            clients.append(connect(target))
        assert send(target, record_of(STATE)) == ""
        assert memory.read_info(tmp_path, 3) == record_of(STATE)
        assert all(is_cut_off(client) for client in clients)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + len(clients) + MAX_PER_ADDRESS
    finally:
        for client in clients:
            client.close()


def test_unauthenticated_clients_of_many_addresses_are_few_as_well(tmp_path: Path) -> None:
    """The whole network may try: those that wait longest go first, at once, and the partner comes in."""
    with keeping(tmp_path, authentication_timeout_s=60.0) as target, ExitStack() as stack:
        host, port = target.split()
        clients = [
            stack.enter_context(socket.create_connection((host, int(port)), 20, (f"127.0.1.{number}", 0)))
            for number in range(1, 4 * MAX_UNAUTHENTICATED)
        ]
        assert send(target, record_of(STATE)) == ""
        assert all(is_cut_off(client) for client in clients[:-MAX_UNAUTHENTICATED])


def test_one_address_crowds_out_only_itself(tmp_path: Path) -> None:
    """A partner that is slow to prove itself is not closed for the connections of somebody else."""
    with keeping(tmp_path, authentication_timeout_s=60.0) as target, ExitStack() as stack:
        host, port = target.split()
        other = stack.enter_context(socket.create_connection((host, int(port)), 20, ("127.0.1.1", 0)))
        assert len(other.recv(16, socket.MSG_WAITALL)) == 16
        clients = [stack.enter_context(connect(target)) for _ in range(2 * MAX_UNAUTHENTICATED)]
        assert all(is_cut_off(client) for client in clients[:-MAX_PER_ADDRESS])
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)


def test_a_partner_that_begins_again_is_not_kept_waiting(tmp_path: Path) -> None:
    """Its earlier connection, over which nothing comes any more, has been given up by it."""
    info = record_of(STATE)
    with keeping(tmp_path, timeout_s=9999.0) as target, connect(target) as stuck:
        header = json.dumps(asdict(info)).encode()
        nonce = stuck.recv(16, socket.MSG_WAITALL)
        stuck.sendall(len(header).to_bytes(4, "big") + header + hmac.new(KEY, nonce + header, "sha256").digest())
        assert stuck.recv(1) == b"\0"  # it may send the state now
        assert send(target, info) == ""
        assert memory.read_info(tmp_path, 3) == info
        assert is_cut_off(stuck)


def test_a_sender_that_strangers_crowd_out_tries_again(tmp_path: Path) -> None:
    """Its connection is the oldest of too many and is closed before it has proven itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(ATTEMPTS - 1):
                listener.accept()[0].close()
            Receiver(KEY, tmp_path, 3, "0000abcd").serve(listener)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert send(f"127.0.0.1 {listener.getsockname()[1]}", record_of(STATE)) == ""
        assert memory.read_info(tmp_path, 3) == record_of(STATE)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


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
    for transfer in plan_transfers(held, local_size, size, save):
        assert held[transfer.source // local_size][transfer.rank] == save
        assert transfer.source // local_size != transfer.rank // local_size
        after[transfer.rank // local_size][transfer.rank] = save
    assert all(after[rank // local_size][rank] == save for rank in range(size))


def test_a_lost_node_gets_its_states_from_the_next() -> None:
    """Two ranks on each of three nodes, each node with a copy of the one before it; the second is replaced."""
    save = Save(80, 7)
    held = [dict.fromkeys(ranks, save) for ranks in ((0, 1, 4, 5), (), (4, 5, 2, 3))]
    assert newest_whole(held, 6) == save
    assert [(transfer.rank, transfer.source) for transfer in plan_transfers(held, 2, 6, save)] == [(2, 4), (3, 5)]


# What the differences between two passes mean: whose they are, and whether a GPU or the program made them.


PLACES = st.integers(0, 50)


@given(first=PLACES, later=st.lists(st.integers(51, 99), min_size=3, max_size=3), wrong=st.integers(0, 3))
def test_of_ranks_that_exchange_activations_the_first_is_named(first: int, later: list[int], wrong: int) -> None:
    """A wrong value is seen by the rank that computed it before the others receive it."""
    places = [*later[:wrong], first, *later[wrong:]]
    differences = [Difference(place, True, 0) for place in places]
    assert suspects(differences, [[0, 1, 2, 3]]) == [[wrong]]


def test_of_stages_the_one_is_named_through_which_the_micro_batch_passes_first() -> None:
    """Forward that is the lower stage, backward the higher one, at any place in the stage's own trace."""
    forward = [Difference(9, True, 0), Difference(1, True, 1), Difference(2, False, 0)]
    assert suspects(forward[:2], [[0, 1]]) == [[0]]
    backward = [Difference(5, False, 0), Difference(40, False, 1)]
    assert suspects(backward, [[0, 1]]) == [[1]]
    assert suspects([forward[2], forward[1]], [[0, 1]]) == [[1]]


def test_each_micro_batch_has_suspects_of_its_own() -> None:
    """Groups in which nothing differs are left out, and ranks that differ in the same place are all named."""
    differing = Difference(3, True, 0)
    assert suspects([None, None, differing, differing], [[0, 1], [2, 3]]) == [[2, 3]]
    assert suspects([differing, None, None, differing], [[0, 1], [2, 3]]) == [[0], [3]]


@given(st.tuples(st.integers(), st.integers()).filter(lambda sums: sums[0] != sums[1]), st.integers())
def test_a_neighbour_that_agrees_with_itself_proves_a_gpu(own: tuple[int, int], theirs: int) -> None:
    """One that differs from itself proves that the program is not deterministic; without one nothing is proved."""
    assert judge(own, (theirs, theirs)) == "gpu"
    assert judge(own, (theirs, theirs + 1)) == "program"
    assert judge(own, None) == "unknown"
