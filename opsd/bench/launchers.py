"""Launchers without ranks, one process each: ``python -m opsd.bench.launchers JSON``.

Prints the process ids on standard output and ends when standard input does. The processes are forked, so that a
thousand of them fit into memory. They write their state into a file that ``States`` reads.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from opsd.checkpoints.claims import End
from opsd.launch.claims.claim_store import Plan
from opsd.launch.claims.messages import Begun, Body, Ready
from opsd.launch.claims.tcp_group import TcpGroup
from opsd.launch.io.loop import Loop, Timer
from opsd.launch.io.protocol import Member

GATHER_S = 0.02
"""Changes within this many seconds are combined into one plan."""
RANKS = 8
LEADERS, NICE = 8, 10
"""The first launchers, which lead in turn, start before the others: on a cluster each has its own machine."""
ANSWER = Ready(29_500, 1_234_567, 1_234_500)
"""As long as a launcher's answer."""
PAYLOAD = {"first": False, "restarts": 0, "noticed_s": 0.0, "keep": 0}
_STATE = struct.Struct("=dqq?")
_PR_SET_PDEATHSIG = 1


def member(number: int, port: int) -> Member:
    """The launcher ``number``, with its own address on the loopback network."""
    return Member(f"n{number:05d}", f"127.77.{number // 250}.{number % 250 + 1}", port)


class State(NamedTuple):
    """When a launcher began its newest plan, on the monotonic clock, its number and slots; whether it is leader."""

    at: float
    number: int
    slots: int
    leader: bool


class States:
    """The states of ``launchers``, numbered from 1 on, in a file that their processes share."""

    def __init__(self, path: Path, launchers: int) -> None:
        with open(path, "a+b") as file:
            file.truncate(launchers * _STATE.size)
            self._memory = mmap.mmap(file.fileno(), launchers * _STATE.size)

    def __getitem__(self, launcher: int) -> State:
        return State(*_STATE.unpack_from(self._memory, (launcher - 1) * _STATE.size))

    def __setitem__(self, launcher: int, state: State) -> None:
        _STATE.pack_into(self._memory, (launcher - 1) * _STATE.size, *state)


class SimulatedLauncher:
    """One launcher and its listener; as leader it gives each live launcher a slot, once all ``expected`` are alive."""

    def __init__(self, number: int, members: Sequence[Member], settings: Mapping[str, Any], states: States) -> None:
        self.loop = Loop()
        self._number, self._states = number, states
        self._expected = len(members)
        self._pending: Timer | None = None
        own = members[number - 1]
        self.group = TcpGroup(
            own, members, Path(settings["folder"]), self.loop,
            start="bench", launcher=own.name, secret=bytes.fromhex(settings["secret"]), size=RANKS,
        )  # fmt: skip
        self.group.start(self)

    def enough(self, reachable: Collection[str]) -> bool:
        return len(reachable) >= self._expected

    def stuck(self) -> bool:
        return True

    def leader_changed(self, leader: str | None) -> None:
        self._states[self._number] = self._states[self._number]._replace(leader=leader == self.group.own.name)
        self._propose_soon()

    def joined(self, member: Member) -> None:
        self._propose_soon()

    def lost(self, name: str, silent_s: float) -> None:
        self._expected = 0
        self._propose_soon()

    def _propose_soon(self) -> None:
        if self._pending is None:
            self._pending = self.loop.later(GATHER_S, self._propose)

    def _propose(self) -> None:
        self._pending = None
        alive = self.group.alive if self.group.leader == self.group.own.name else {}
        if len(alive) >= max(self._expected, 1) and len(alive) != self._states[self._number].slots:
            self.group.propose(tuple(sorted(alive)), PAYLOAD)

    def prepare(self, plan: Plan) -> None:
        self.group.ready(plan.number, ANSWER)

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        self._expected = 0
        leader = self.group.leader == self.group.own.name
        self._states[self._number] = State(time.monotonic(), plan.number, len(plan.slots), leader)

    def cut_off(self) -> None:
        """There are no ranks to end."""

    def overtaken(self) -> None:
        raise SystemExit("another copy of the benchmark has claimed its folder")

    def over(self, end: End) -> None:
        """Nobody ends this run."""

    def received(self, sender: str, body: Body) -> None:
        """Messages are not used in this benchmark."""


def _fork(number: int, members: Sequence[Member], settings: Mapping[str, Any], states: States) -> int:
    """The launcher ``number`` in a process that ends with this one."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if number > LEADERS:
        os.nice(NICE)
    if os.getppid() == parent:
        SimulatedLauncher(number, members, settings, states).loop.run()
    os._exit(1)


def main() -> None:
    """Run the launchers until standard input ends."""
    settings = json.loads(sys.argv[1])
    members = [member(number, settings["port"]) for number in range(1, settings["nodes"] + 1)]
    states = States(Path(settings["states"]), len(members))
    gc.collect()
    gc.freeze()
    pids = [_fork(number, members, settings, states) for number in range(1, len(members) + 1)]
    print(json.dumps(pids), flush=True)
    sys.stdin.buffer.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
