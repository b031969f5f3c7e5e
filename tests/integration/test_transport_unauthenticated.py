"""Connections that do not authenticate: they change nothing and use few descriptors."""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsd.launch.io.connection import Frames, encode
from opsd.launch.io.handshake import VERSION, Handshake, Identity
from opsd.launch.io.protocol import Member
from tests.fakes import unauthenticated
from tests.fakes.transport import NET, SECRET, Launcher, Launchers

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
