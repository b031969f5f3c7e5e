"""Launchers of a run in a world of virtual time: their network, folder and processes fail at random.

Launchers of a run in a world of virtual time: their network, their shared folder and their processes fail at random.

All that outlives a process is in the folder: a launcher that is begun again under the name of a dead one has lost what
that one knew, so there are no restarts with state to be told from those without. ``InvariantChecker`` watches.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from opsd.checkpoints.claims import Claim, End
from opsd.launch.claims.claim_store import Plan, StoreRead
from opsd.launch.claims.group import Group
from opsd.launch.claims.messages import Begun, Message, Ready
from opsd.launch.io.protocol import Member
from opsd.launch.run.nodes import RunShape, assign_slots

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
        self.intact: dict[int, Claim] = {}
        """Claims that are damaged now, as they were."""
        self.lease = (0, 0)
        self.stalled: dict[str, float] = {}
        """Whose folder answers only from when on; "" stands for everybody's."""
        self.stale: dict[str, tuple[float, float]] = {}
        """Who sees the folder as it was at a time, and until when."""
        self.lost_answers = 0.0
        self.asked_to_end = False
        """Somebody has told a leader to end the run."""
        self.launchers: dict[str, Launcher] = {}
        self.folder: Callable[[World, str, Launcher], FakeClaimStore] = FakeClaimStore
        """What launchers that begin from now on have for the run's folder."""
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
            assert self.now - begun < limit_s, f"waited in vain, at {self.now:.1f}: {self.job_log()}"
            self.run(TICK_S)
        return self.now - begun

    def job_log(self) -> list[tuple[Any, ...]]:
        claims = [(round(t, 2), c.number, c.launcher, c.plan.get("slots", c.plan.get("end"))) for t, c in self.claims]
        return [
            *claims,
            *((one.name, one.core.phase, one.core.number, one.core.leader, one.ranks) for one in self.alive),
        ]

    @property
    def alive(self) -> list[Launcher]:
        return [one for one in self.launchers.values() if not one.dead]

    @property
    def newest(self) -> Claim | None:
        return self.claims[-1][1] if self.claims else None

    def damage(self) -> None:
        """Somebody has written into the newest claim: its number is all that is left of it."""
        time, claim = self.claims[-1]
        self.intact.setdefault(claim.number, claim)
        self.claims[-1] = (time, Claim(claim.number, "", ""))

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


class FakeClaimStore:
    """The ``ClaimStore`` of one launcher."""

    error = None

    def __init__(self, world: World, name: str, process: Launcher) -> None:
        self._world, self._name, self._process = world, name, process
        self._told: Claim | None = None

    def told(self, claim: Claim) -> None:
        self._told = claim

    def read(self, *, full: bool) -> None:
        def serve_read() -> None:
            claim = self.seen()
            if claim is not None and self._told is not None and claim.number == self._told.number:
                claim = self._told
            lease = self._world.lease
            found = (
                StoreRead(lease, claim, True)
                if full or lease[0] > self._process.core.number
                else StoreRead(lease, None, False)
            )
            self._answer(lambda core, now: core.store_read(now, found))

        self._when_served(serve_read)

    def seen(self) -> Claim | None:
        """The newest claim that this node's view of the folder shows."""
        then, until = self._world.stale.get(self._name, (0.0, 0.0))
        claims = self._world.claims
        if self._world.now < until:
            claims = [(t, claim) for t, claim in claims if t <= then or claim.launcher == self._process.launcher]
        return claims[-1][1] if claims else None

    def claim(self, claim: Claim) -> None:
        def make() -> None:
            mine = self._world.newest == claim
            if not mine and self.wins(claim):
                mine = True
                self._world.claims.append((self._world.now, claim))
            said = None if self._world.random.random() < self._world.lost_answers else mine
            self._answer(lambda core, now: core.claimed(now, said))

        self._when_served(make)

    def wins(self, claim: Claim) -> bool:
        """Whether the number is free."""
        newest = self._world.newest
        return newest is None or newest.number < claim.number

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

    def _answer(self, call: Callable[[Group, float], None]) -> None:
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
    """A launcher with a simple leader: every loss of a node at work is answered by the next generation.

    What it takes over goes on if all of its nodes are there, as with the leader of ``opsd.launch.run``.
    """

    world: World
    name: str
    expected: tuple[str, ...]
    shape: RunShape
    start: str = "run"
    dead: bool = False
    paused: bool = False
    paused_at: float = 0.0
    ranks: Running | None = None
    left: End | str | None = None
    known_slots: tuple[str, ...] = ()
    needy: bool = False
    changing: bool = False
    ending: bool = False
    part: bool = False
    """Whether it has ever had a part in the run, or waits for another one."""
    lack: bool = False
    preparing: int = 0
    waiting: list[tuple[str, Message]] = field(default_factory=list)
    answers: list[Callable[[], None]] = field(default_factory=list)
    incarnations = itertools.count(1)

    def __post_init__(self) -> None:
        self.launcher = f"{self.name}-{next(self.incarnations)}"
        self.core = Group(
            member(self.name), [member(name) for name in self.expected],
            lambda target, message: self.world.send(self.name, target, message),
            self.world.folder(self.world, self.name, self), self._wake,
            size=1, start=self.start, launcher=self.launcher, now=self.world.now,
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

    def _wake(self) -> None:
        """As the launcher's loop does: soon, unless the process is gone or stands still by then."""
        self.world.later(0.0, lambda: None if self.dead or self.paused else self.core.flush())

    def kill(self, *, noticed: bool = False) -> None:
        """End the process; ``noticed``: its machine refuses connections."""
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

    def enough(self, reachable: Collection[str]) -> bool:
        return len(reachable) >= self.shape.least

    def stuck(self) -> bool:
        return self.ranks is None

    def leader_changed(self, leader: str | None) -> None:
        self.ending = False
        if leader == self.name:
            self._take_over()
        if leader is not None:
            self._tell_lack()

    def _take_over(self) -> None:
        plan, core = self.core.plan, self.core
        self.known_slots = plan.slots if plan is not None else ()
        self.changing = not core.begun
        whole = plan is not None and plan.slots and not set(plan.slots) - core.alive.keys()
        if plan is None or not whole or not core.begun:
            self._propose()
        elif not core.holds:
            core.propose(plan.slots, {"keep": plan.generation})

    def end(self, **left: object) -> None:
        """As the leader, end the run; the next start inherits what is ``left``."""
        self.ending = self.world.asked_to_end = True
        self.core.end(0, "done", memory=left)

    def _propose(self) -> None:
        if self.ending:
            return
        slots = assign_slots(self.shape, self.known_slots, self.core.alive.keys(), ())
        self.needy, self.changing = slots is None, True
        self.core.propose(slots or (), {"keep": 0})

    def prepare(self, plan: Plan) -> None:
        self.known_slots = plan.slots or self.known_slots
        self.preparing, self.part = plan.number, True
        if plan.payload.get("keep") and (self.ranks is None or self.ranks.number == plan.generation):
            self.core.ready(plan.number, Ready(20_001, plan.number, None))
            return
        self.lack = False

        def ended() -> None:
            if not self.dead and self.preparing == plan.number:
                self.ranks = None
                self.core.ready(plan.number, Ready(20_001, plan.number, None))

        def when_awake() -> None:
            if self.paused:
                self.answers.append(ended)
            else:
                ended()

        self.world.later(0.02 + self.world.random.random() * 0.1, when_awake)

    def begin(self, plan: Plan, begun: Begun | None) -> None:
        self.changing = False
        if begun is None:
            self.ranks = None
        elif self.name in plan.slots and not plan.payload["keep"]:
            self.ranks = Running(plan.number, plan.slots)
        at_work = self.ranks is not None and self.ranks.number == plan.generation
        if self.name in plan.slots and not at_work:
            self.core.tell_leader({"kind": "waiting", "number": plan.generation})

    def cut_off(self) -> None:
        self.ranks, self.lack = None, True

    def _tell_lack(self) -> None:
        """The ranks of the newest generation ended for want of a leader."""
        if self.lack and self.core.plan is not None:
            self.lack = False
            self.core.tell_leader({"kind": "waiting", "number": self.core.plan.generation})

    def overtaken(self) -> None:
        self.left, self.ranks, self.dead = "overtaken", None, True

    def over(self, end: End) -> None:
        self.left, self.ranks, self.dead = end, None, True

    def joined(self, member: Member) -> None:
        if self.needy:
            self._propose()

    def lost(self, name: str, silent_s: float) -> None:
        if self.changing or (self.core.plan is not None and name in self.core.plan.slots):
            self._propose()

    def received(self, sender: str, body: dict[str, Any]) -> None:
        plan = self.core.plan
        if self.core.phase == "leading" and plan is not None and body == {"kind": "waiting", "number": plan.generation}:
            self._propose()


# What must never be seen in the world of ``tests.fakes.group``, and faults that come at random.
#
# The judge sees what somebody outside would see: which ranks run where, who has left, and which claims are made. It
# knows nothing of how launchers come to an agreement.


LOOK_LIMIT_S = 3.0
"""So long may ranks go on after a later claim, from when on their launcher could have seen it."""
REST_S = 45.0
"""Within so long after the last fault the run goes on, whole."""
QUIET_S = 5.0


class InvariantChecker:
    """Looks at the world some times a second, and says what must never be seen."""

    def __init__(self, world: World, least: int) -> None:
        self._world = world
        self._least = least
        self._plans: dict[int, tuple[str, ...]] = {}
        self._ran: dict[tuple[int, str], str] = {}
        self._overdue: dict[str, float] = {}
        self._seen = 0
        world.later(0.0, self.look)

    def look(self) -> None:
        """Look now, and again."""
        self._check_claims()
        for one in self._world.launchers.values():
            self._check_ranks(one)
            assert not one.left or self._may_leave(one), f"{one.name} has left: {self._world.job_log()}"
        self._world.later(0.25, self.look)

    def _check_claims(self) -> None:
        claims = self._world.claims
        for (_, before), (_, claim) in itertools.pairwise(claims[max(0, self._seen - 1) :]):
            assert claim.number > before.number, "two claims of one number"
        self._seen = len(claims)

    def _check_ranks(self, one: Launcher) -> None:
        ranks, world = one.ranks, self._world
        if ranks is None:
            self._overdue.pop(one.name, None)
            return
        assert self._plans.setdefault(ranks.number, ranks.slots) == ranks.slots, "one generation, two plans"
        assert self._ran.setdefault((ranks.number, one.name), one.launcher) == one.launcher, "begun by two processes"
        assert one.name in ranks.slots
        blind = max(world.stalled.get("", 0.0), world.stalled.get(one.name, 0.0), world.stale.get(one.name, (0, 0))[1])
        if self._may_run(one, ranks.number) or one.paused or blind > world.now:
            self._overdue[one.name] = world.now
        else:
            since = self._overdue.setdefault(one.name, world.now)
            assert world.now - since < LOOK_LIMIT_S, f"{one.name} runs {ranks.number} for good: {world.job_log()}"

    def _may_run(self, one: Launcher, number: int) -> bool:
        newest = self._world.newest
        if newest is None or newest.end is not None:
            return False
        newest = self._world.intact.get(newest.number, newest)
        return number in (newest.number, newest.keeps) and newest.start == one.start

    def _may_leave(self, one: Launcher) -> bool:
        """At the end of the run that somebody has asked for, and for another copy of it."""
        claims = [claim for _, claim in self._world.claims]
        if isinstance(one.left, End):
            return self._world.asked_to_end and any(
                claim.end == one.left for claim in claims if claim.start == one.start
            )
        return any(claim.start not in (one.start, "") for claim in claims)

    def at_rest(self) -> bool:
        """Whether the newest generation runs on all its nodes, and nothing else anywhere; or the run has ended."""
        newest = self._world.newest
        if newest is not None and newest.end is not None:
            return not any(one.part for one in self._world.alive)
        if newest is None or not newest.plan.get("slots"):
            return False
        running = {one.name: one.ranks.number for one in self._world.alive if one.ranks is not None}
        slots = newest.plan["slots"]
        return len(slots) >= self._least and running == dict.fromkeys(slots, newest.keeps or newest.number)

    def comes_to_rest(self) -> None:
        """Within ``REST_S`` the run goes on, and nothing disturbs it."""
        world, limit = self._world, self._world.now + REST_S
        while True:
            world.until(self.at_rest, limit - world.now)
            before = world.newest
            world.run(QUIET_S)
            if self.at_rest() and world.newest == before:
                return
            assert world.now < limit, f"no rest: {world.job_log()}"


class FaultInjection:
    """Random faults, as many as told, then rest. ``folder`` as in ``World``."""

    FAULTS = (
        "kill", "kill noticed", "restart", "pause", "flap", "partition", "one way", "isolate", "deaf", "loss", "slow",
        "stall", "stall one", "stale", "lost answers", "damage", "heal", "calm",
    )  # fmt: skip

    def __init__(self, seed: int, launchers: int, least: int, most: int) -> None:
        self.world = World(seed)
        self.names = tuple(f"n{number}" for number in range(1, launchers + 1))
        self._shape = RunShape(least, most, self.names)
        self.judge = InvariantChecker(self.world, least)
        self._over = False
        for name in self.names:
            self._begin(name)

    def _begin(self, name: str) -> None:
        Launcher(self.world, name, self.names, self._shape)

    def go(self, faults: int) -> None:
        """The whole episode. Raises AssertionError."""
        world = self.world
        world.run(world.random.random() * 6)
        for _ in range(faults):
            self._fault(world.random.choice(self.FAULTS))
            world.run(world.random.choice((0.05, 0.3, 1.0, 2.2, 4.0, 9.0)) * (0.5 + world.random.random()))
        if world.random.random() < 0.2:
            self._end()
        self._over = True
        world.heal()
        if world.asked_to_end:
            world.run(5.0)
        for name in self.names:
            if world.launchers[name].dead and not (world.newest and world.newest.end):
                self._begin(name)
        self.judge.comes_to_rest()

    def _end(self) -> None:
        """Somebody who leads, or believes so, ends the run: all that are there do, or it was too late for that."""
        leading = [one for one in self.world.alive if one.core.phase == "leading" and not one.paused]
        if leading:
            self.world.random.choice(leading).end()

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
        elif fault == "damage" and world.claims:
            world.damage()
        elif fault == "heal":
            world.heal()
        elif fault == "calm":
            world.run(12.0)


# A run of several simulated launchers, with its invariants checked.


JOB = "r, job 7.{}"


class Run:
    """Launchers n1, n2, … of a run with ``least`` to ``most`` nodes at work, and the judge."""

    def __init__(
        self, launchers: int, least: int, most: int, *, start: str = "run", world: World | None = None
    ) -> None:
        self.world = world or World(launchers)
        self.names = tuple(f"n{number}" for number in range(1, launchers + 1))
        self.shape, self._start = RunShape(least, most, self.names), start
        self.judge = InvariantChecker(self.world, least)
        for name in self.names:
            self.begin(name)

    def begin(self, name: str) -> None:
        """Start the launcher ``name``, or start it again: all that it ever knew is in the folder."""
        Launcher(self.world, name, self.names, self.shape, self._start)

    def __getitem__(self, name: str) -> Launcher:
        return self.world.launchers[name]

    def rests(self) -> Run:
        self.judge.comes_to_rest()
        return self

    @property
    def leader(self) -> str:
        (leader,) = {one.core.leader for one in self.world.alive if not one.paused}
        assert leader is not None
        return leader

    @property
    def slots(self) -> list[list[str]]:
        return [claim.plan["slots"] for _, claim in self.world.claims if "slots" in claim.plan]

    @property
    def kept(self) -> list[int]:
        return [claim.keeps for _, claim in self.world.claims]

    def until_claim(self, number: int, limit_s: float = 30.0) -> float:
        return self.world.until(lambda: bool(self.world.newest and self.world.newest.number >= number), limit_s)

    def others(self, *names: str) -> list[str]:
        return [name for name in self.names if name not in names]


def claim_of(number: int, leader: str, slots: Iterable[str], keep: int) -> Claim:
    """A claim that a process of the run made which nobody has seen."""
    slots = tuple(slots)
    members = tuple(member(name) for name in ("n1", "n2", "n3"))
    plan = Plan(number, leader, slots, members, {one.name: 1 for one in members}, {"keep": keep})
    return Claim(number, "run", f"{leader}-unseen", plan=plan.to_json(), keeps=keep)
