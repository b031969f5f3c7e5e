"""Launchers that are connected over TCP, in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opsd.launch.io.handshake import Identity, lookup
from opsd.launch.io.loop import Loop
from opsd.launch.io.protocol import Member, ProtocolError
from opsd.launch.io.transport import Transport
from opsd.ports import free_port

SECRET = b"s" * 32


LAUNCHERS = 150


class Launcher:
    """A transport, and all that it has told."""

    def __init__(self, loop: Loop, member: Member, lookup: Callable[[str], str] = lookup, **identity: Any) -> None:
        self.member = member
        self.heard: list[tuple[str, Any]] = []
        self.gone: list[str] = []
        self.superseded = 0
        self.said: list[str] = []
        self.opened: list[tuple[str, str]] = []
        self.own = Identity(member, **{"run": "run", "secret": SECRET, **identity})
        self.transport = Transport(
            self.own, loop,
            received=self._receive,
            unreachable=self.gone.append,
            superseded=self._stand_down,
            print_message=self.said.append,
            launchers=lambda: LAUNCHERS,
            opened=lambda other, incarnation: self.opened.append((other.name, incarnation)),
            lookup=lookup,
        )  # fmt: skip
        self.transport.listen()

    def _receive(self, sender: Member, message: dict[str, Any]) -> None:
        if message["n"] < 0:
            raise ProtocolError("a message of an unknown kind")
        self.heard.append((sender.name, message["n"]))

    def _stand_down(self) -> None:
        self.superseded += 1

    def send(self, other: Launcher, number: int = 1, **more: Any) -> None:
        self.transport.send(other.member, {"n": number, **more})


class Launchers:
    """Several in one loop, each with an address of its own."""

    def __init__(self, addresses: Callable[[int], str]) -> None:
        self.loop = Loop()
        self.port = free_port()
        self.all: list[Launcher] = []
        self._addresses = addresses

    def start(self, number: int, **identity: Any) -> Launcher:
        member = Member(f"n{number}", self._addresses(number), self.port)
        self.all.append(Launcher(self.loop, member, **identity))
        return self.all[-1]

    def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Let the loop run until the condition holds."""
        ended = False
        deadline = time.monotonic() + timeout_s

        def look() -> None:
            nonlocal ended
            if not ended and (condition() or time.monotonic() > deadline):
                ended = True
                self.loop.stop()
            elif not ended:
                self.loop.later(0.005, look)

        look()
        if not ended:
            self.loop.run()
        self.loop._running = True
        assert condition(), [
            (each.member.name, each.heard[-3:], each.gone, each.said, each.opened) for each in self.all
        ]

    def pass_time(self, seconds: float) -> None:
        """Let the loop run for a while."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def descriptors(self) -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    def close(self) -> None:
        for launcher in self.all:
            launcher.transport.close()


NET = os.getpid() % 200 + 20


@pytest.fixture
def launchers() -> Iterator[Launchers]:
    launchers = Launchers(lambda number: f"127.{NET}.2.{number}")
    yield launchers
    launchers.close()
