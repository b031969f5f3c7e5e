"""Random faults, and proof that the invariant checker can fail."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from opsd.checkpoints.claims import Claim
from opsd.launch.claims.claim_store import Plan
from opsd.launch.run.nodes import RunShape
from tests.fakes.group import FakeClaimStore, Launcher, World
from tests.fakes.group_run import Run
from tests.fakes.invariants import FaultInjection


@pytest.mark.parametrize("seed", range(200))
def test_random_episodes_come_to_rest(seed: int) -> None:
    """Loss, cuts in one and both directions, pauses, kills, restarts, stalls, stale reads, damaged claims: one run."""
    episode(seed, 8)


def episode(seed: int, faults: int) -> int:
    """Play one; returns the number of events."""
    launchers = 1 + seed % 8
    least = 1 + seed // 8 % launchers
    most = least + seed // 64 % (launchers - least + 1)
    trouble = FaultInjection(seed, launchers, least, most)
    trouble.go(faults)
    return trouble.world.events


class TwoWin(FakeClaimStore):
    """A file system on which every claim succeeds."""

    def wins(self, claim: Claim) -> bool:
        return True


class NeverNews(FakeClaimStore):
    """A folder that shows for ever what it showed at first."""

    def seen(self) -> Claim | None:
        if not hasattr(self, "_first") or self._first is None:
            self._first = super().seen()
        return self._first


class Deaf(Launcher):
    """A launcher that ends no ranks."""

    def prepare(self, plan: Plan) -> None:
        pass


@pytest.mark.parametrize("folder", [FakeClaimStore, TwoWin])
def test_the_judge_sees_two_claims_of_one_number(folder: type[FakeClaimStore]) -> None:
    """On a file system that excludes nobody: a leader's claim is held up while the others, cut off, make theirs."""
    world = World(1)
    world.folder = folder
    run = Run(4, 1, 4, world=world).rests()
    world.stalled["n1"] = world.now + 10.0
    run["n4"].kill(noticed=True)
    world.cut(["n1"], ["n2", "n3"])
    with pytest.raises(AssertionError, match="two claims of one number") if folder is TwoWin else nullcontext():
        world.run(12.0)
        world.heal()
        run.rests()


def test_the_judge_sees_who_never_looks() -> None:
    """The leader of a side that was cut off, and passed over."""
    world = World(1)
    world.folder = NeverNews
    run = Run(3, 1, 3, world=world)
    world.until(run.judge.at_rest)
    world.folder = FakeClaimStore
    for name in ("n2", "n3"):
        run[name].kill()
        run.begin(name)
    world.cut(["n1"], ["n2", "n3"])
    with pytest.raises(AssertionError, match="for good"):
        world.run(60.0)


def test_the_judge_sees_ranks_that_are_not_ended() -> None:
    """A launcher that knows of the later claim and does nothing."""
    run = Run(2, 1, 2).rests()
    Deaf(run.world, "n3", ("n1", "n2", "n3"), RunShape(1, 3, ("n1", "n2", "n3")))
    run["n3"].ranks = run["n2"].ranks
    with pytest.raises(AssertionError):
        run.world.run(10.0)


def test_the_judge_sees_who_leaves_a_healthy_run() -> None:
    """For no reason."""
    run = Run(2, 1, 2).rests()
    run["n2"].overtaken()
    with pytest.raises(AssertionError, match="n2 has left"):
        run.world.run(1.0)


def test_the_judge_sees_an_end_that_nobody_asked_for() -> None:
    """The run was healthy."""
    run = Run(2, 1, 2).rests()
    run["n1"].core.end(0, "done")
    with pytest.raises(AssertionError, match="has left"):
        run.world.run(2.0)


def test_the_judge_sees_a_generation_that_two_processes_began() -> None:
    """A launcher that was restarted takes up the ranks' place as if nothing had been."""
    run = Run(2, 1, 2).rests()
    ranks = run["n2"].ranks
    run["n2"].kill()
    run.begin("n2")
    run["n2"].ranks = ranks
    with pytest.raises(AssertionError, match="begun by two processes"):
        run.judge.look()


def test_the_judge_sees_a_run_that_does_not_go_on() -> None:
    """Its file server never comes back."""
    run = Run(2, 1, 2).rests()
    run["n2"].kill()
    run.world.stalled[""] = run.world.now + 600.0
    with pytest.raises(AssertionError, match="waited in vain"):
        run.rests()
