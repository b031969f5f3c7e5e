"""A head of a run on several nodes, with its fellows and the time played."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from select import select
from typing import Any

from opsd.launch.io.loop import Timer
from opsd.launch.io.member import Member, Message
from opsd.launch.io.run_log import RunLog
from opsd.launch.quorum.port import Listener, Plan
from opsd.launch.ranks.failure import Failure, RestartPolicy
from opsd.launch.run.head import Head
from opsd.launch.run.placement import Shape
from opsd.launch.run.reports import failure_to_json

NODES = ("n1", "n2", "n3")
SPARE = "n4"


def member(name: str) -> Member:
    return Member(name, f"10.0.0.{name[1:]}", 20_000)


class PlayedLoop:
    """Timers whose time passes when told to, and descriptors that are looked at then."""

    def __init__(self) -> None:
        self.now = 0.0
        self._watched: dict[int, Callable[[], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now + delay_s, callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        self._watched[descriptor] = callback

    def unwatch(self, descriptor: int) -> None:
        del self._watched[descriptor]

    def settle(self) -> None:
        """Wait for all that is done beside the loop."""
        while self._watched:
            for descriptor in select(list(self._watched), [], [])[0]:
                self._watched[descriptor]()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()
        self.now = end


class PlayedQuorum:
    """An agreement in which everybody who is alive always agrees."""

    def __init__(self, *names: str) -> None:
        self.own = member("n1")
        self.head: str | None = "n1"
        self.plan: Plan | None = None
        self.alive = {name: member(name) for name in names}
        self.proposals: list[Plan] = []
        self.orders: list[Message] = []

    def start(self, listener: Listener) -> None: ...

    def propose(self, slots: tuple[str, ...], payload: Mapping[str, Any]) -> int:
        members = tuple(self.alive[name] for name in sorted(self.alive))
        self.proposals.append(Plan(len(self.proposals) + 1, slots, members, json.loads(json.dumps(payload))))
        return len(self.proposals)

    def ready(self, number: int, answer: Message) -> None: ...

    def tell_head(self, message: Message) -> None: ...

    def tell_all(self, message: Message) -> None:
        self.orders.append(message)

    def decide_tie(self, go_on: bool) -> None: ...

    def leave(self) -> None: ...


class Stage:
    """A head and its world: two ranks a node."""

    def __init__(
        self, folder: Path, *alive: str, least: int = 3, most: int = 3, max_restarts: int = 8, wait_s: float = 0.0
    ) -> None:
        self.loop = PlayedLoop()
        self.quorum = PlayedQuorum(*alive)
        self.folder = folder
        self.bad: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.shape = Shape(least, most, (*NODES, SPARE), join_s=60.0, wait_s=wait_s)
        self.max_restarts = max_restarts
        self.head = self.new_head()

    @classmethod
    def at_work(cls, folder: Path) -> Stage:
        """Three nodes at work and a spare."""
        stage = cls(folder, *NODES, SPARE)
        stage.head.take_over(None, {})
        return stage.begun()

    def new_head(self) -> Head:
        log = RunLog("run", "n1", self.folder / "events.jsonl")
        policy = RestartPolicy(self.max_restarts)
        return Head(self.shape, self.quorum, self.loop, policy, log, lambda *bad: self.bad.append(bad))  # type: ignore[arg-type]

    def begun(self) -> Stage:
        """The last proposal becomes valid."""
        plan = self.quorum.plan = self.quorum.proposals[-1]
        self.head.began(plan, self.answers(plan))
        return self

    def answers(self, plan: Plan) -> dict[str, Message]:
        names = [member.name for member in plan.members]
        return {name: {"local_size": 2, "port": 1, "furthest": None, "committed": None} for name in names}

    def lose(self, *names: str) -> None:
        for name in names:
            del self.quorum.alive[name]
        for name in names:
            self.head.lost(name, 2.0)

    def tell(self, sender: str, kind: str, **fields: Any) -> None:
        plan = self.quorum.plan
        number = plan.number if plan is not None else 0
        self.head.received(sender, {"kind": kind, "generation": number, **fields})

    def fail(self, sender: str, rank: int, kind: Any, **fields: Any) -> None:
        failure = Failure(rank, "exit code 1", kind, 100.0, **fields)
        self.tell(sender, "failed", failures=[failure_to_json(failure, 100.0)])

    @property
    def over(self) -> list[tuple[int, str]]:
        """How the launchers were told to end."""
        return [(order["code"], order["reason"]) for order in self.quorum.orders if order["kind"] == "finish"]

    @property
    def slots(self) -> list[tuple[str, ...]]:
        return [plan.slots for plan in self.quorum.proposals]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == kind]
