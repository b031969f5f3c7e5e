"""Launchers that agree over a network of which delay, loss, partitions and power are played; time is virtual."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

from opsd.launch.io.member import Member, Message
from opsd.launch.quorum.core import Core
from opsd.launch.quorum.port import Plan

TICK_S = 0.05


class Launcher:
    """A listener that plays the head's part in the simplest way: whoever is alive gets a slot in every plan."""

    def __init__(self, network: Network, member: Member, core: Core) -> None:
        self.network, self.member, self.core = network, member, core
        self.name = member.name
        self.begun: list[tuple[float, Plan]] = []
        self.heads: list[str | None] = []
        self.lost_ones: list[tuple[float, str]] = []
        self.isolated_at: list[float] = []
        self.heard: list[tuple[str, Message]] = []
        self.running = 0
        self.on = True
        self.frozen = False
        self.go_on_in_tie = False
        core.start(self)

    def head_changed(self, head: str | None) -> None:
        self.heads.append(head)
        if head == self.name:
            assert self.network.elected.setdefault(self.core.term, head) == head, "two heads in one term"
        if head == self.name and (self.core.plan is None or not self.running):
            self._propose()
        elif head is not None and self.core.plan is not None and not self.running:
            self.core.tell_head({"ended": True})

    def _propose(self) -> None:
        if len(self.core.alive) >= self.network.least:
            self.core.propose(tuple(sorted(self.core.alive)), {"by": self.name, "term": len(self.heads)})

    def prepare(self, plan: Plan) -> None:
        self.running = 0
        self.network.later(0.05, lambda: self.on and self.core.ready(plan.number, {"of": self.name}))

    def begin(self, plan: Plan, answers: Mapping[str, Message]) -> None:
        self.begun.append((self.network.now, plan))
        self.running = plan.number if self.name in plan.slots else 0

    def isolated(self) -> None:
        self.running = 0
        self.isolated_at.append(self.network.now)

    def tied(self, absent: tuple[str, ...]) -> None:
        self.core.decide_tie(self.go_on_in_tie)

    def joined(self, member: Member) -> None:
        self._propose()

    def lost(self, name: str, silent_s: float) -> None:
        self.lost_ones.append((self.network.now, name))
        self._propose()

    def received(self, sender: str, message: Message) -> None:
        if "ended" in message:
            self._propose()
        else:
            self.heard.append((sender, message))


class Network:
    """``size`` launchers; ``delay`` gives the seconds that a message takes at least, None if it is lost.

    Messages of one launcher to another do not overtake each other.
    """

    def __init__(self, size: int, *, seed: int = 0, least: int | None = None) -> None:
        self.now = 0.0
        self.least = least if least is not None else size // 2 + 1
        self.random = random.Random(seed)
        self.delay: Callable[[str, str], float | None] = lambda _a, _b: 0.001 + self.random.random() * 0.002
        self.sides: dict[str, int] = {}
        self.elected: dict[int, str] = {}
        self.unsaid: set[tuple[str, str]] = set()
        """(launcher, kind): messages of that kind which get lost."""
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self._order = itertools.count()
        self._arrivals: dict[tuple[str, str], float] = {}
        members = [Member(f"n{index:04d}", f"127.1.0.{index}", 1) for index in range(1, size + 1)]
        self.launchers: dict[str, Launcher] = {}
        for member in members:
            self.add(member, members)

    def add(self, member: Member, initial: list[Member]) -> Launcher:
        """Another launcher, which takes the others for ``initial``."""
        first = int(self.now * 1000) + 1
        core = Core(
            member, initial, lambda to, message: self._send(member, to, message), now=self.now, first_message=first
        )
        launcher = self.launchers[member.name] = Launcher(self, member, core)
        self.later(self.random.random() * TICK_S, lambda: self._tick(launcher))
        return launcher

    def later(self, delay_s: float, call: Callable[[], Any]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), call))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = end

    def run_until(self, condition: Callable[[], bool], within_s: float) -> float:
        """Seconds until ``condition`` was true."""
        began = self.now
        while not condition():
            assert self.now - began < within_s, "waited in vain"
            self.run(0.01)
        return self.now - began

    def kill(self, *names: str) -> None:
        for name in names:
            self.launchers[name].on = False

    def part(self, *sides: list[str]) -> None:
        """Messages pass only within a side; without sides everywhere."""
        self.sides = {name: number for number, side in enumerate(sides) for name in side}

    @property
    def living(self) -> list[Launcher]:
        return [launcher for launcher in self.launchers.values() if launcher.on]

    def settled(self, *names: str) -> bool:
        """True if these, or all that live, run the same newest plan, whose slots are just they."""
        group = [self.launchers[name] for name in names] or self.living
        slots = tuple(sorted(launcher.name for launcher in group))
        plans = [launcher.core.plan for launcher in group]
        return all(
            plan is not None and plan.slots == slots and launcher.running == plan.number
            for launcher, plan in zip(group, plans, strict=True)
        )

    def _tick(self, launcher: Launcher) -> None:
        if launcher.on:
            if not launcher.frozen:
                launcher.core.tick(self.now)
            self.later(TICK_S, lambda: self._tick(launcher))

    def _send(self, sender: Member, to: Member, message: Message) -> None:
        receiver = self.launchers.get(to.name)
        delay = self.delay(sender.name, to.name)
        if receiver is None or delay is None or (sender.name, message["kind"]) in self.unsaid:
            return

        def arrive() -> None:
            passes = self.sides.get(sender.name) == self.sides.get(to.name)
            if passes and receiver.on and self.launchers[sender.name].on:
                if receiver.frozen:
                    self.later(0.1, arrive)
                else:
                    receiver.core.receive(self.now, sender, message)

        way = (sender.name, to.name)
        self._arrivals[way] = max(self.now + delay, self._arrivals.get(way, 0.0))
        self.later(self._arrivals[way] - self.now, arrive)
