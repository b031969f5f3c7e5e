"""Launchers that claim and run no ranks, many of them in one process: ``python -m opsd.bench.launchers JSON``.

To a line on standard input it answers with the oldest of the newest plans of its launchers, its number of slots, when
the last of them began, and whether the head is one of them.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from opsd.checkpoints.claims import End
from opsd.launch.claims.messages import Begun, Body, Ready
from opsd.launch.claims.node import TcpGroup
from opsd.launch.claims.plan import Plan
from opsd.launch.io.loop import Loop, Timer
from opsd.launch.io.protocol import Member

GATHER_S = 0.02
"""Changes that come so shortly after each other make one plan."""
RANKS = 8
ANSWER = Ready(29_500, 1_234_567, 1_234_500)
"""As long as what a launcher answers."""
PAYLOAD = {"first": False, "restarts": 0, "noticed_s": 0.0, "keep": 0}


def member(number: int, port: int) -> Member:
    """The launcher ``number``, with an address of its own on the loopback network."""
    return Member(f"n{number:05d}", f"127.77.{number // 250}.{number % 250 + 1}", port)


class Simulated:
    """One launcher and its listener; as head it gives a slot to each that is alive, once all ``expected`` are."""

    def __init__(self, own: Member, members: Sequence[Member], settings: Mapping[str, Any], loop: Loop) -> None:
        self.loop = loop
        self.begun: tuple[int, int, float] = (0, 0, 0.0)
        """Number and slots of the newest plan, and when it began."""
        self._expected = len(members)
        self._pending: Timer | None = None
        self.group = TcpGroup(
            own, members, Path(settings["folder"]), loop,
            start="bench", launcher=own.name, secret=bytes.fromhex(settings["secret"]), size=RANKS,
        )  # fmt: skip
        self.group.start(self)

    def enough(self, near: Collection[str]) -> bool:
        return len(near) >= self._expected

    def stuck(self) -> bool:
        return True

    def head_changed(self, head: str | None) -> None:
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
        alive = self.group.alive if self.group.head == self.group.own.name else {}
        if len(alive) >= max(self._expected, 1) and len(alive) != self.begun[1]:
            self.group.propose(tuple(sorted(alive)), PAYLOAD)

    def prepare(self, plan: Plan) -> None:
        self.group.ready(plan.number, ANSWER)

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        self._expected = 0
        self.begun = (plan.number, len(plan.slots), time.monotonic())

    def cut_off(self) -> None:
        """Nothing runs here that would have to end."""

    def overtaken(self) -> None:
        raise SystemExit("another copy of the benchmark has claimed its folder")

    def over(self, end: End) -> None:
        """Nobody ends this run."""

    def received(self, sender: str, body: Body) -> None:
        """Nothing is said in this benchmark."""


class Launchers:
    """The launchers of this process."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.loop = Loop()
        everybody = [member(number, settings["port"]) for number in range(1, settings["nodes"] + 1)]
        first, last = settings["numbers"]
        self._launchers = [Simulated(own, everybody, settings, self.loop) for own in everybody[first - 1 : last]]
        self.loop.watch(sys.stdin.fileno(), self._answer)

    def _answer(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            self.loop.stop()
            return
        begun = [launcher.begun for launcher in self._launchers]
        number, slots, _ = min(begun)
        head = any(launcher.group.head == launcher.group.own.name for launcher in self._launchers)
        print(json.dumps([number, slots, max(at for _, _, at in begun), head]), flush=True)


def main() -> None:
    """Serve until standard input ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    launchers = Launchers(json.loads(sys.argv[1]))
    print(json.dumps(time.monotonic()), flush=True)
    launchers.loop.run()


if __name__ == "__main__":
    main()
