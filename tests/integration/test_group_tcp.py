"""Launchers that claim and talk over real connections, and in a world of virtual time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opsd.checkpoints import claims
from opsd.checkpoints.claims import Claim
from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.generation_state import TIMEOUT_S
from opsd.launch.claims.tcp_group import TcpGroup
from opsd.launch.io.loop import Loop
from opsd.launch.io.protocol import Member
from opsd.ports import free_port
from tests.fakes import group_process
from tests.fakes.clock import eventually
from tests.fakes.group import FaultInjection
from tests.fakes.group_process import PrintingListener

# Launchers that claim and talk over real connections, each a process with an address of its own on loopback.


SECRET = "11" * 32


class Launchers:
    """Processes by name; ``told(name)`` is what each has printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.net = os.getpid() % 200 + 20

    def member(self, number: int) -> list[Any]:
        return [f"n{number}", f"127.{self.net}.0.{number}", self.port]

    def start(self, number: int, size: int, *, secret: str = SECRET, run: str = "run") -> None:
        own = self.member(number)
        settings = {
            "own": own,
            "members": [self.member(other) for other in range(1, size + 1)],
            "run": run,
            "secret": secret,
            "least": 2,
            "folder": str(self.folder / "run"),
        }
        with (self.folder / own[0]).open("ab") as out:
            script = [sys.executable, group_process.__file__, json.dumps(settings)]
            self.processes[own[0]] = subprocess.Popen(script, stdout=out)

    def told(self, name: str, event: str) -> list[dict[str, Any]]:
        lines = (self.folder / name).read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["event"] == event]

    def begun(self, *names: str) -> bool:
        """True if the newest plan of each of these has just them in it."""
        plans = [self.told(name, "begin")[-1:] for name in names]
        return all(plan and plan[0]["slots"] == sorted(names) for plan in plans)

    def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        assert eventually(condition, timeout_s), {name: (self.folder / name).read_text() for name in self.processes}

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    launchers = Launchers(tmp_path)
    yield launchers
    launchers.close()


@pytest.fixture
def three(launchers: Launchers) -> Launchers:
    for number in (1, 2, 3):
        launchers.start(number, 3)
    launchers.until(lambda: launchers.begun("n1", "n2", "n3"))
    return launchers


def test_a_killed_leader_is_replaced_at_once(three: Launchers) -> None:
    """Its machine says that it is gone: nobody waits for a timeout."""
    leader = three.told("n1", "leader")[-1]["leader"]
    others = [name for name in three.processes if name != leader]
    killed_at = time.monotonic()
    three.processes[leader].kill()
    three.until(lambda: three.begun(*others))
    lost = [event["t"] for name in others for event in three.told(name, "leader") if event["leader"] is None]
    assert min(at for at in lost if at > killed_at) - killed_at < TIMEOUT_S


def test_a_stopped_launcher_is_as_good_as_lost(three: Launchers) -> None:
    """It answers nothing, though its connections stand; when it goes on, it takes part again."""
    three.processes["n3"].send_signal(signal.SIGSTOP)
    three.until(lambda: three.begun("n1", "n2"))
    three.processes["n3"].send_signal(signal.SIGCONT)
    three.until(lambda: three.begun("n1", "n2", "n3"))


def test_who_would_be_called_next_is_looked_up_and_nobody_else(tmp_path: Path) -> None:
    """The leader and the first nodes of a generation, while there is time; not the names of all."""

    def address(number: int) -> str:
        return f"{number}{'x' * 63}"  # too long for a name: no name service is asked

    own = Member("n1", "127.0.0.1", free_port())
    members = (own, *(Member(f"n{number}", address(number), 1) for number in range(2, 10)))
    names = [member.name for member in members[1:]]
    plan = Plan(1, "n2", tuple(names), members, dict.fromkeys(names, 1), {"keep": 0})
    claims.create(tmp_path, Claim(1, "run", "n2-1", plan=plan.to_json()))
    said: list[str] = []
    loop = Loop()
    group = TcpGroup(
        own, members, tmp_path, loop, start="run", launcher="n1-1", secret=bytes(32), size=1, print_message=said.append,
    )  # fmt: skip
    group.start(PrintingListener(group, least=2))
    until = time.monotonic() + 20.0
    loop.every(0.1, lambda: loop.stop() if len(said) >= 3 or time.monotonic() > until else None)
    loop.run()
    group.leave()
    assert {text.partition(" ")[0] for text in said} == {address(number) for number in (2, 3, 4)}


def test_one_that_comes_later_is_taken_in(three: Launchers) -> None:
    """It knows the others, and the secret."""
    three.start(4, 4)
    three.until(lambda: three.begun("n1", "n2", "n3", "n4"))


# Launchers in a world of virtual time, for a million events of random faults.


EVENTS = 1_000_000


@pytest.mark.long
def test_a_million_events_of_trouble() -> None:
    """Runs of one to eight launchers, five to sixty faults each: none has two sides, ends for nothing, or stands still.

    An episode that fails is told by its seed.
    """
    seed = events = 0
    while events < EVENTS:
        pick = random.Random(seed)
        launchers = pick.randrange(1, 9)
        least = pick.randrange(1, launchers + 1)
        trouble = FaultInjection(seed, launchers, least, pick.randrange(least, launchers + 1))
        try:
            trouble.go(pick.randrange(5, 60))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        events += trouble.world.events
        seed += 1
