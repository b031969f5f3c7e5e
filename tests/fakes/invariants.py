"""What must never be seen in the world of ``tests.fakes.group``, and faults that come at random.

The judge sees what somebody outside would see: which ranks run where, who has left, and which claims are made. It knows
nothing of how launchers come to an agreement.
"""

from __future__ import annotations

import itertools

from opsd.checkpoints.claims import End
from opsd.launch.run.nodes import RunShape
from tests.fakes.group import Launcher, World

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
