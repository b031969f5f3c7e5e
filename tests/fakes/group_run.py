"""A run of several simulated launchers, with its invariants checked."""

from __future__ import annotations

from collections.abc import Iterable

from opsd.checkpoints.claims import Claim
from opsd.launch.claims.claim_store import Plan
from opsd.launch.run.nodes import RunShape
from tests.fakes.group import Launcher, World, member
from tests.fakes.invariants import InvariantChecker

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
