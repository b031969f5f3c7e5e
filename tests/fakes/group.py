"""Launchers of a run in a world of virtual time: their network, their shared folder and their processes fail at random.

The judge at the end of this module sees what somebody outside would see: which ranks run where, and which claims are
made. It knows nothing of how launchers come to an agreement.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from opsd.checkpoints.claims import Claim, End
from opsd.launch.claims.core import Core
from opsd.launch.claims.looks import Look
from opsd.launch.claims.messages import Begun, Message, Ready
from opsd.launch.claims.plan import Plan
from opsd.launch.io.member import Member
from opsd.launch.run.placement import Shape, place

TICK_S = 0.05
KEPT_MESSAGES_S = 3.0
"""What is sent to a process that stands still waits for so long in its sockets; then connections are cut."""


def member(name: str) -> Member:
    return Member(name, f"10.0.0.{name[1:]}", 20_000)


class World:
    """Time, the network, and the folder as it truly is."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.events = 0
        self.random = random.Random(seed)
        self.loss = self.duplicates = 0.0
        self.slow_s = 0.002
        self.cuts: set[tuple[str, str]] = set()
        self.claims: list[tuple[float, Claim]] = []
        self.lease = (0, 0)
        self.stalled: dict[str, float] = {}
        """Whose folder answers only from when on; "" stands for everybody's."""
        self.stale: dict[str, tuple[float, float]] = {}
        """Who sees the folder as it was at a time, and until when."""
        self.lost_answers = 0.0
        self.launchers: dict[str, Launcher] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), call))

    def later(self, delay: float, call: Callable[[], None]) -> None:
        self.at(self.now + delay, call)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, call = heapq.heappop(self._queue)
            self.events += 1
            call()
        self.now = end

    def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> float:
        """Run until something holds; the seconds that it took."""
        begun = self.now
        while not condition():
            assert self.now - begun < limit_s, f"waited in vain, at {self.now:.1f}: {self.story()}"
            self.run(TICK_S)
        return self.now - begun

    def story(self) -> list[tuple[Any, ...]]:
        claims = [(round(t, 2), c.number, c.launcher, c.plan.get("slots", c.plan.get("end"))) for t, c in self.claims]
        return [*claims, *((one.name, one.core.phase, one.core.number, one.core.head, one.ranks) for one in self.alive)]

    @property
    def alive(self) -> list[Launcher]:
        return [one for one in self.launchers.values() if not one.dead]

    @property
    def newest(self) -> Claim | None:
        return self.claims[-1][1] if self.claims else None

    def send(self, source: str, target: Member, message: Message) -> None:
        copies = 1 + (self.random.random() < self.duplicates)
        for _ in range(copies):
            if self.random.random() >= self.loss:
                delay = self.slow_s * (0.5 + self.random.random())
                self.later(delay, lambda: self._deliver(source, target.name, message))

    def _deliver(self, source: str, target: str, message: Message) -> None:
        one = self.launchers.get(target)
        if (source, target) in self.cuts or one is None or one.dead:
            return
        if one.paused:
            if self.now - one.paused_at < KEPT_MESSAGES_S:
                one.waiting.append((source, message))
        else:
            one.core.receive(self.now, member(source), message)

    def cut(self, side: Iterable[str], other: Iterable[str], *, one_way: bool = False) -> None:
        for a, b in itertools.product(side, list(other)):
            self.cuts.add((a, b))
            if not one_way:
                self.cuts.add((b, a))

    def heal(self) -> None:
        self.cuts.clear()
        self.stalled.clear()
        self.stale.clear()
        self.loss = self.duplicates = self.lost_answers = 0.0
        for one in self.alive:
            one.resume()


class PlayedFolder:
    """The ``Folder`` of one launcher."""

    def __init__(self, world: World, name: str, process: Launcher) -> None:
        self._world, self._name, self._process = world, name, process

    def look(self, *, whole: bool) -> None:
        def read() -> None:
            claim = self.seen()
            lease = self._world.lease
            found = Look(lease, claim, True) if whole or lease[0] > self._process.core.number else Look(lease, None, False)
            self._answer(lambda core, now: core.looked(now, found))

        self._when_served(read)

    def seen(self) -> Claim | None:
        """The newest claim that this node's view of the folder shows."""
        then, until = self._world.stale.get(self._name, (0.0, 0.0))
        claims = self._world.claims
        if self._world.now < until:
            claims = [(t, claim) for t, claim in claims if t <= then or claim.launcher == self._process.launcher]
        return claims[-1][1] if claims else None

    def claim(self, claim: Claim) -> None:
        def make() -> None:
            newest = self._world.newest
            mine = newest is None or newest.number < claim.number
            if mine:
                self._world.claims.append((self._world.now, claim))
            said = None if self._world.random.random() < self._world.lost_answers else mine
            self._answer(lambda core, now: core.claimed(now, said))

        self._when_served(make)

    def renew(self, number: int, beat: int) -> None:
        def write() -> None:
            self._world.lease = (number, beat)

        self._when_served(write)

    def _when_served(self, operation: Callable[[], None]) -> None:
        """Once the file server answers; the process may be dead or stand still by then, and the operation is done."""

        def serve() -> None:
            stalled = max(self._world.stalled.get("", 0.0), self._world.stalled.get(self._name, 0.0))
            if stalled > self._world.now:
                self._world.later(min(stalled - self._world.now, 0.5) + self._world.random.random() * 0.1, serve)
            else:
                operation()

        self._world.later(0.0005 + self._world.random.random() * 0.003, serve)

    def _answer(self, call: Callable[[Core, float], None]) -> None:
        process = self._process

        def give() -> None:
            if process.dead:
                return
            if process.paused:
                process.answers.append(lambda: call(process.core, self._world.now))
            else:
                call(process.core, self._world.now)

        self._world.later(0.0005, give)


@dataclass
class Running:
    """Ranks at work."""

    number: int
    slots: tuple[str, ...]


@dataclass
class Launcher:
    """A launcher with a simple head: every loss of a node at work is answered by the next generation."""

    world: World
    name: str
    expected: tuple[str, ...]
    shape: Shape
    start: str = "run"
    dead: bool = False
    paused: bool = False
    paused_at: float = 0.0
    ranks: Running | None = None
    left: End | str | None = None
    known_slots: tuple[str, ...] = ()
    needy: bool = False
    lack: bool = False
    preparing: int = 0
    waiting: list[tuple[str, Message]] = field(default_factory=list)
    answers: list[Callable[[], None]] = field(default_factory=list)
    incarnations = itertools.count(1)

    def __post_init__(self) -> None:
        self.launcher = f"{self.name}-{next(self.incarnations)}"
        self.core = Core(
            member(self.name), [member(name) for name in self.expected],
            lambda target, message: self.world.send(self.name, target, message),
            PlayedFolder(self.world, self.name, self), size=1, start=self.start, launcher=self.launcher,
            now=self.world.now,
        )  # fmt: skip
        self.core.start(self)
        self.world.launchers[self.name] = self
        self.world.later(self.world.random.random() * TICK_S, self._tick)

    def _tick(self) -> None:
        if self.dead:
            return
        if not self.paused:
            self.core.tick(self.world.now)
        self.world.later(TICK_S, self._tick)

    def kill(self, *, noticed: bool = False) -> None:
        """End the process; ``noticed``: its machine says so to whoever calls."""
        self.dead, self.ranks = True, None
        if noticed:
            for other in self.world.alive:
                if (other.name, self.name) not in self.world.cuts and not other.paused:
                    other.core.unreachable(self.world.now, self.name)

    def pause(self) -> None:
        if not self.paused:
            self.paused, self.paused_at = True, self.world.now

    def resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        answers, self.answers = self.answers, []
        for answer in answers:
            answer()
        messages, self.waiting = self.waiting, []
        for source, message in messages:
            self.core.receive(self.world.now, member(source), message)

    # -- the listener --------------------------------------------------------------------------------------------

    def enough(self, near: Collection[str]) -> bool:
        return len(near) >= self.shape.least

    def head_changed(self, head: str | None) -> None:
        if head == self.name:
            plan = self.core.plan
            self.known_slots = plan.slots if plan is not None else ()
            if plan is None or set(plan.slots) - self.core.alive.keys() or not plan.slots:
                self._propose()
            elif self.core.phase == "claiming":
                self._propose()
        if head is not None:
            self._tell_lack()

    def _propose(self) -> None:
        slots = place(self.shape, self.known_slots, self.core.alive.keys(), ())
        self.needy = slots is None
        self.core.propose(slots or (), {"restarts": 1, "keep": 0})

    def prepare(self, plan: Plan) -> None:
        self.known_slots = plan.slots or self.known_slots

        self.preparing, self.lack = plan.number, False

        def ended() -> None:
            if not self.dead and self.preparing == plan.number:
                self.ranks = None
                self.core.ready(plan.number, Ready(20_001, plan.number, None))
                self.core.flush()

        def when_awake() -> None:
            if self.paused:
                self.answers.append(ended)
            else:
                ended()

        self.world.later(0.02 + self.world.random.random() * 0.1, when_awake)

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        if begun is None:
            self.core.tell_head({"kind": "waiting", "number": plan.number})
        elif self.name in plan.slots:
            self.ranks = Running(plan.number, plan.slots)

    def cut_off(self) -> None:
        self.ranks, self.lack = None, True

    def _tell_lack(self) -> None:
        """The ranks of the newest generation ended for want of a head."""
        if self.lack and self.core.plan is not None:
            self.lack = False
            self.core.tell_head({"kind": "waiting", "number": self.core.plan.number})

    def overtaken(self) -> None:
        self.left, self.ranks, self.dead = "overtaken", None, True

    def over(self, end: End) -> None:
        self.left, self.ranks, self.dead = end, None, True

    def joined(self, member: Member) -> None:
        if self.needy:
            self._propose()

    def lost(self, name: str, silent_s: float) -> None:
        if self.core.plan is None or name in self.core.plan.slots:
            self._propose()

    def received(self, sender: str, body: dict[str, Any]) -> None:
        if self.core.phase == "leading" and body["kind"] == "waiting" and body["number"] == self.core.number:
            self._propose()


LOOK_LIMIT_S = 3.0
"""So long may ranks go on after a later claim, from when on their launcher could have seen it."""
REST_S = 45.0
"""Within so long after the last fault the run goes on, whole."""


class Judge:
    """Looks at the world some times a second, and says what must never be seen."""

    def __init__(self, world: World, least: int) -> None:
        self._world = world
        self._least = least
        self._plans: dict[int, tuple[str, ...]] = {}
        self._overdue: dict[str, float] = {}
        self._seen = 0

    def look(self) -> None:
        """Look now, and again."""
        world = self._world
        self._check_claims()
        newest = world.newest.number if world.newest is not None else 0
        for one in world.launchers.values():
            self._check_ranks(one, newest)
        assert not [one for one in world.launchers.values() if one.left], f"a launcher has left: {world.story()}"
        world.later(0.25, self.look)

    def _check_claims(self) -> None:
        claims = self._world.claims
        for (_, before), (_, claim) in itertools.pairwise(claims[max(0, self._seen - 1) :]):
            assert claim.number > before.number, "two claims of one number"
        self._seen = len(claims)

    def _check_ranks(self, one: Launcher, newest: int) -> None:
        ranks, world = one.ranks, self._world
        if ranks is None:
            self._overdue.pop(one.name, None)
            return
        assert self._plans.setdefault(ranks.number, ranks.slots) == ranks.slots, "one generation, two plans"
        assert one.name in ranks.slots
        blind = max(world.stalled.get("", 0.0), world.stalled.get(one.name, 0.0), world.stale.get(one.name, (0, 0))[1])
        if ranks.number >= newest or one.paused or blind > world.now:
            self._overdue[one.name] = world.now
        else:
            since = self._overdue.setdefault(one.name, world.now)
            assert world.now - since < LOOK_LIMIT_S, f"{one.name} runs {ranks.number} for good: {world.story()}"

    def at_rest(self) -> bool:
        """Whether the newest generation runs on all its nodes, and nothing else anywhere."""
        world = self._world
        newest = world.newest
        if newest is None or not newest.plan.get("slots"):
            return False
        running = {one.name: one.ranks.number for one in world.alive if one.ranks is not None}
        slots = newest.plan["slots"]
        return len(slots) >= self._least and running == dict.fromkeys(slots, newest.number)


class Trouble:
    """Random faults, as many as told, then rest."""

    FAULTS = (
        "kill", "kill noticed", "restart", "pause", "flap", "partition", "one way", "isolate", "deaf", "loss", "slow",
        "stall", "stall one", "stale", "lost answers", "heal", "calm",
    )  # fmt: skip

    def __init__(self, seed: int, launchers: int, least: int, most: int) -> None:
        self.world = World(seed)
        self.names = tuple(f"n{number}" for number in range(1, launchers + 1))
        self._shape = Shape(least, most, self.names)
        self.judge = Judge(self.world, least)
        self._over = False
        for name in self.names:
            self._begin(name)
        self.world.later(0.0, self.judge.look)

    def _begin(self, name: str) -> None:
        Launcher(self.world, name, self.names, self._shape)

    def go(self, faults: int) -> None:
        """The whole episode. Raises AssertionError."""
        world = self.world
        world.run(world.random.random() * 6)
        for _ in range(faults):
            self._fault(world.random.choice(self.FAULTS))
            world.run(world.random.choice((0.05, 0.3, 1.0, 2.2, 4.0, 9.0)) * (0.5 + world.random.random()))
        self._over = True
        world.heal()
        for name in self.names:
            if world.launchers[name].dead:
                self._begin(name)
        world.until(self.judge.at_rest, REST_S)
        world.run(5.0)
        assert self.judge.at_rest(), f"no rest: {world.story()}"

    def _flap(self, one: str) -> None:
        if not self._over:
            self.world.cut([one], [name for name in self.names if name != one])

    def _fault(self, fault: str) -> None:
        world, names = self.world, self.names
        one = world.random.choice(names)
        launcher, seconds = world.launchers[one], world.random.choice((0.5, 3.0, 8.0, 60.0))
        side = world.random.sample(names, world.random.randrange(1, len(names))) if len(names) > 1 else []
        rest = [name for name in names if name not in side]
        if fault.startswith("kill") and not launcher.dead:
            launcher.kill(noticed=fault != "kill")
        elif fault == "restart":
            launcher.kill(noticed=True)
            self._begin(one)
        elif fault == "pause" and not launcher.dead:
            launcher.pause()
            world.later(seconds, launcher.resume)
        elif fault == "flap":
            for number in range(4):
                world.later(6.0 * number, lambda: self._flap(one))
                world.later(6.0 * number + 3.0, world.cuts.clear)
        elif fault == "partition":
            world.cut(side, rest)
        elif fault == "one way":
            world.cut(side, rest, one_way=True)
        elif fault in ("isolate", "deaf"):
            others = [name for name in names if name != one]
            world.cut(others, [one], one_way=fault == "deaf")
        elif fault == "loss":
            world.loss, world.duplicates = world.random.choice((0.05, 0.3, 0.6)), 0.1
        elif fault == "slow":
            world.slow_s = world.random.choice((0.002, 0.05, 0.4))
        elif fault.startswith("stall"):
            world.stalled["" if fault == "stall" else one] = world.now + seconds
        elif fault == "stale":
            world.stale[one] = (world.now, world.now + seconds)
        elif fault == "lost answers":
            world.lost_answers = 0.5
        elif fault == "heal":
            world.heal()
        elif fault == "calm":
            world.run(12.0)
