"""Launchers that exchange messages over real connections, also with peers that do not authenticate."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsd.launch.io.connection import Connection, Frames, encode
from opsd.launch.io.handshake import VERSION, Handshake, Identity
from opsd.launch.io.protocol import Member
from opsd.ports import free_port
from tests.fakes import unauthenticated
from tests.fakes.transport import NET, SECRET, Launcher, Launchers

# Launchers that exchange messages over real connections.


def test_messages_arrive_in_order(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """Both ways, also if both call at once."""
    one, two = launchers.start(3), launchers.start(4)
    for number in range(200):
        one.send(two, number)
        two.send(one, number)
    launchers.until(lambda: len(one.heard) == len(two.heard) == 200)
    assert two.heard == [("n3", number) for number in range(200)]
    assert one.heard == [("n4", number) for number in range(200)]


def test_over_ipv6() -> None:
    """As over IPv4."""
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    launchers = Launchers(lambda number: "::1")
    one = launchers.start(1)
    launchers.port = free_port()
    two = launchers.start(2)
    one.send(two)
    two.send(one)
    launchers.until(lambda: one.heard == [("n2", 1)] and two.heard == [("n1", 1)])
    launchers.close()


def test_names_are_looked_up_when_they_are_called(launchers: Launchers) -> None:
    """In threads: a name service that takes its time for one holds up nobody else, and what was sent arrives after."""
    answers = {"n2": threading.Event(), "n3": threading.Event()}

    def lookup(host: str) -> str:
        answers[host].wait(20.0)
        return f"127.{NET}.2.{host[1:]}"

    one = launchers.start(1, lookup=lookup)
    two, three = launchers.start(2), launchers.start(3)
    for other in (two, three):
        one.transport.send(Member(other.member.name, other.member.name, launchers.port), {"n": 7})
    answers["n3"].set()
    launchers.until(lambda: three.heard == [("n1", 7)])
    assert two.heard == []
    answers["n2"].set()
    launchers.until(lambda: two.heard == [("n1", 7)])


def test_a_name_that_was_looked_up_in_time_is_called_without_a_name_service(launchers: Launchers) -> None:
    """Nothing is sent before there is something to say."""
    asked: list[str] = []

    def lookup(host: str) -> str:
        asked.append(host)
        if len(asked) > 1:
            raise OSError(errno.ENOENT, "Name or service not known")
        return f"127.{NET}.2.{host[1:]}"

    one, two = launchers.start(1, lookup=lookup), launchers.start(2)
    named = Member("n2", "n2", launchers.port)
    one.transport.look_up([named])
    launchers.until(lambda: asked)
    launchers.pass_time(0.1)
    assert two.opened == []
    one.transport.send(named, {"n": 7})
    launchers.until(lambda: two.heard == [("n1", 7)])
    assert asked == ["n2"]


def test_a_name_without_an_address_is_said_once(launchers: Launchers) -> None:
    """Its launcher may still call this one, and is answered then."""

    def lookup(host: str) -> str:
        raise OSError(errno.ENOENT, "Name or service not known")

    one, two = launchers.start(1, lookup=lookup), launchers.start(2)
    unknown = Member("n2", "n2", launchers.port)
    for number in range(5):
        one.transport.send(unknown, {"n": number})
        launchers.pass_time(0.02)
    assert [text.partition(";")[0] for text in one.said] == ["n2 has no address here (Name or service not known)"]
    two.send(one)
    launchers.until(lambda: one.heard)
    one.transport.send(unknown, {"n": 9})
    launchers.until(lambda: two.heard == [("n1", 9)])


def test_one_that_has_ended_is_told_at_once(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """Its machine refuses connections: nobody waits for silence."""
    one, two = pair
    two.transport.close()
    launchers.until(lambda: one.gone == ["n2"])


def test_a_dropped_launcher_is_not_told_and_may_call_again(
    launchers: Launchers, pair: tuple[Launcher, Launcher]
) -> None:
    """The side that drops it knows that it is lost, or will know soon."""
    one, two = pair
    one.transport.drop("n2")
    two.send(one, 5)
    launchers.until(lambda: len(one.opened) == 2)
    assert one.gone == []
    two.send(one, 6)
    launchers.until(lambda: ("n2", 6) in one.heard)
    one.transport.drop("n9")


def test_the_next_process_of_a_launcher_is_told_apart(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """Once it has proven itself, nothing of the one before is heard any more."""
    one, two = pair
    again = Launcher(launchers.loop, Member("n2", two.member.address, launchers.port + 1))
    launchers.all.append(again)
    again.send(one, 7)
    launchers.until(lambda: ("n2", 7) in one.heard)
    assert one.opened == [("n2", two.own.incarnation), ("n2", again.own.incarnation)]
    assert one.gone == []
    launchers.until(lambda: two.superseded == 1)
    before = len(one.heard)
    two.send(one, 8)
    launchers.until(lambda: two.superseded == 2)
    assert any("another launcher n2, which was started later" in said for said in two.said)
    assert (one.superseded, again.superseded) == (0, 0)
    again.send(one, 9)
    launchers.until(lambda: len(one.heard) > before)
    assert one.heard[before:] == [("n2", 9)]


def test_connections_do_not_pile_up(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """A launcher that calls again has lost its connection, which this side may not have noticed: one stays."""
    one, two = pair
    opened: list[Connection] = []
    closed: list[Connection] = []
    for number in range(1, 31):
        Connection(
            socket.socket(), launchers.loop, one.own, expected=two.member,
            opened=opened.append, received=lambda *_: None, closed=lambda each, _: closed.append(each),
        )  # fmt: skip
        launchers.until(lambda number=number: len(opened) == number)  # type: ignore[misc]
    launchers.until(lambda: len(closed) >= 29)
    assert two.gone == two.said == []


def test_one_that_floods_is_cut_with_a_sentence(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """It knows the secret, and has gone wild: the others are heard meanwhile and afterwards."""
    one, two = pair
    three = launchers.start(3)

    def flood() -> None:
        if not one.said:
            for number in range(500):
                two.send(one, number)
            three.send(one, 1)
            launchers.loop.later(0.0, flood)

    flood()
    launchers.until(lambda: one.said)
    assert one.said[0].startswith(f"no connection with the launcher at {two.member.address} (n2): it says more than")
    three.send(one, 99)
    launchers.until(lambda: ("n3", 99) in one.heard)


def test_what_is_not_understood_is_said_once(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """A newer neighbour may say it twenty times a second; what else it says is heard."""
    one, two = pair
    for number in (-1, -1, 7):
        one.send(two, number)
    launchers.until(lambda: ("n1", 7) in two.heard)
    assert two.said == ["n1 sends a message of an unknown kind; it is ignored"]


@pytest.mark.parametrize(
    ("change", "why"),
    [({"secret": b"t" * 32}, "does not know the secret of this run"), ({"run": "other"}, "belongs to the run")],
)
def test_one_of_another_run_is_refused(launchers: Launchers, change: dict[str, Any], why: str) -> None:
    """Another secret or another run: a clear sentence on both sides, without the secret, and nothing is heard."""
    one, two = launchers.start(1), launchers.start(2, **change)
    two.send(one)
    launchers.until(lambda: one.said and two.said)
    assert why in one.said[0] + two.said[0]
    assert one.heard == one.opened == two.opened == []


# Connections that do not authenticate: they change nothing and use few descriptors.


LAUNCHERS = 150

FEW = 24
"""Descriptors that launchers and unauthenticated connections may use in these tests, beside the test's own."""


def frame(message: Any) -> bytes:
    payload = json.dumps(message).encode()
    return struct.pack(">I", len(payload)) + payload


HELLO = {
    "kind": "greeting", "opsd": VERSION, "run": "run", "nonce": "00", "incarnation": "00",
    "member": {"name": "n9", "address": "127.0.0.1", "port": 9},
}  # fmt: skip


def answer(launchers: Launchers, launcher: Launcher, data: bytes) -> bytes:
    """What an unauthenticated client gets that sends ``data``, until the connection is closed."""
    got = bytearray()
    with socket.create_connection((launcher.member.address, launcher.member.port), timeout=10) as connection:
        connection.sendall(data)
        connection.setblocking(False)

        def closed() -> bool:
            try:
                data = connection.recv(4096)
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
            got.extend(data)
            return not data

        launchers.until(closed)
    return bytes(got)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 1 << 31),
        frame({"opsd": VERSION}),
        frame(HELLO | {"opsd": 99}),
        frame(HELLO) + frame({"kind": "proof", "proof": "zz"}),
        frame(HELLO) + frame({"kind": "proof", "proof": "00" * 32}),
        frame(HELLO) + frame(HELLO),
        frame(HELLO | {"member": None}),
        frame([1]),
        frame({"refused": "no"}),
        struct.pack(">I", 4000) + b"[" * 4000,
    ],
)
def test_whatever_is_sent_to_the_port_changes_nothing(
    launchers: Launchers, pair: tuple[Launcher, Launcher], data: bytes
) -> None:
    """The connection is closed with one sentence, and the launchers go on."""
    one, two = pair
    answer(launchers, two, data)
    assert len(two.said) == 1
    one.send(two, 77)
    launchers.until(lambda: ("n1", 77) in two.heard)


def test_a_version_that_does_not_fit_is_told_to_the_caller(launchers: Launchers) -> None:
    """The other side learns why, to say it to its user."""
    got = answer(launchers, launchers.start(1), frame(HELLO | {"opsd": 99}))
    assert "install the same opsd on all nodes" in json.loads(got[4:])["refused"]


def test_who_drips_is_cut_after_two_seconds(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """A byte now and then does not lengthen the time within which one has to prove oneself."""
    _, two = pair
    with socket.create_connection((two.member.address, two.member.port), timeout=10) as connection:
        connection.sendall(struct.pack(">I", 4000))

        def cut() -> bool:
            try:
                connection.send(b" ")
            except (BrokenPipeError, ConnectionResetError):
                return True
            return False

        launchers.until(cut)
    assert two.said == []


class Calling:
    """A process that connects to one launcher without authenticating."""

    def __init__(self, launcher: Launcher, idle: int, sources: int = 0) -> None:
        target = [launcher.member.address, str(launcher.member.port), str(idle)]
        command = [sys.executable, unauthenticated.__file__, *target, *([str(sources)] if sources else [])]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # they have begun

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class Caller:
    """A launcher that takes its time with the handshake."""

    def __init__(self, target: Launcher, number: int) -> None:
        address = f"127.{NET}.3.{number}"
        own = Identity(Member(f"c{number}", address, 9), "run", SECRET)
        self._handshake, self._frames = Handshake(own, target.member), Frames()
        self._socket = socket.create_connection(
            (target.member.address, target.member.port), timeout=10, source_address=(address, 0)
        )
        for message in self._handshake.begin():
            self._socket.sendall(self._frames.pack(encode(message)))

    def prove(self) -> None:
        while not self._handshake.proven:
            for heard in self._frames.feed(self._socket.recv(4096)):
                for message in self._handshake.hear(heard):
                    self._socket.sendall(self._frames.pack(encode(message)))

    def close(self) -> None:
        self._socket.close()


def test_all_launchers_of_a_run_may_call_at_once(launchers: Launchers) -> None:
    """Their leader is gone, and this one leads next: each gets in, though unauthenticated clients call meanwhile."""
    one = launchers.start(1)
    callers = [Caller(one, number) for number in range(1, LAUNCHERS + 1)]
    with Calling(one, idle=200, sources=100):
        launchers.pass_time(0.5)
        for caller in callers:
            caller.prove()
        launchers.until(lambda: len(one.opened) == LAUNCHERS)
    for caller in callers:
        caller.close()


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """A quarter of the limit that many systems have for a service, above what earlier tests have left open."""
    gc.collect()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 256 + max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
@pytest.mark.parametrize("sources", [0, 200])
def test_unauthenticated_connections_take_few_descriptors_and_hold_nobody_up(
    few_descriptors: int, launchers: Launchers, pair: tuple[Launcher, Launcher], sources: int
) -> None:
    """Thousands that are idle, and others that connect as fast as they can, from one address or from many.

    The launcher opens files as ever, hears its peers, and takes in one that comes meanwhile.
    """
    one, two = pair
    before = launchers.descriptors()
    most, number = before, 0
    with Calling(two, idle=2000, sources=sources):
        end = time.monotonic() + 3.0

        def beat() -> bool:
            nonlocal most, number
            number += 1
            one.send(two, number)
            most = max(most, launchers.descriptors())  # which opens a folder, or fails the test
            return time.monotonic() > end

        launchers.until(beat)
        launchers.until(lambda: ("n1", number) in two.heard)
        three = launchers.start(3)

        def comes() -> bool:
            three.send(two, 1)
            return ("n3", 1) in two.heard

        launchers.until(comes)
    assert [n for sender, n in two.heard if sender == "n1"] == [1, *range(1, number + 1)]
    assert most - before <= (FEW if not sources else few_descriptors // 8 + FEW)
    assert one.gone == two.gone == []


def test_the_last_descriptors_are_kept_for_the_launcher(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """Those who call then are turned away with a sentence; those who are connected notice nothing."""
    one, two = pair
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(3)]  # for the client, for its other end, and one more
    for descriptor in free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[2] + 1, limits[1]))
    try:
        assert answer(launchers, two, b"hello") == b""
        assert two.said == ["no connections of other launchers: too few descriptors; raise `ulimit -n`"]
        two.send(one, 5)
        launchers.until(lambda: ("n2", 5) in one.heard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_without_any_descriptor_the_loop_does_not_spin(launchers: Launchers, pair: tuple[Launcher, Launcher]) -> None:
    """Those who call wait until there are some again."""
    _, two = pair
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what earlier tests left open would free descriptors below the limit
    with socket.create_connection((two.member.address, two.member.port), timeout=10) as client:
        lowest = os.dup(client.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            client.sendall(b"hello")
            launchers.until(lambda: any("ulimit -n" in said for said in two.said))
            before = time.process_time()
            launchers.pass_time(0.9)
            assert time.process_time() - before < 0.5
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        client.setblocking(False)
        launchers.until(lambda: _closed(client))


def _closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
