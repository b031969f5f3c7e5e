"""The end of a run, its next start, and several copies of one run."""

from __future__ import annotations

import pytest

from opsd.checkpoints.claims import Claim, End
from opsd.launch.claims.messages import Leave, Message
from opsd.launch.io.protocol import Member
from opsd.launch.run.nodes import RunShape
from tests.fakes.group import Launcher, World
from tests.fakes.group_run import JOB, Run, claim_of


@pytest.mark.parametrize("fault", ["none", "paused", "cut", "stalled", "killed leader"])
def test_the_end_is_obeyed_by_all(fault: str) -> None:
    """A launcher that was not told finds it in the folder: frozen, cut off, or its leader dead."""
    run = Run(4, 2, 3).rests()
    if fault == "paused":
        run["n3"].pause()
    elif fault == "cut":
        run.world.cut(["n3"], run.others("n3"))
    elif fault == "stalled":
        run.world.stalled[""] = run.world.now + 20.0
    run["n1"].end()
    if fault == "killed leader":
        run.world.until(lambda: run.world.newest is not None and run.world.newest.end is not None)
        run["n1"].kill()
    run.world.run(1.0)
    run.world.run(25.0 if fault == "stalled" else 0.0)
    if fault == "paused":
        assert not run["n3"].left
        run["n3"].resume()
    run.world.run(2.0)
    told = run.others("n1") if fault == "killed leader" else run.names
    assert {run[name].left for name in told} == {End(0, "done")}


class Leaving(World):
    """Notes who tells whom that it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []

    def send(self, source: str, target: Member, message: Message) -> None:
        if isinstance(message, Leave):
            self.told.append((source, target.name))
        super().send(source, target, message)


@pytest.mark.parametrize(
    ("who", "lost", "told"),
    [("n1", (), ("n2", "n3", "n4", "n5", "n6")), ("n3", (), ("n1",)), ("n4", ("n1", "n2", "n3"), ("n5", "n6"))],
    ids=["leader", "follower", "without a leader"],
)
def test_who_leaves_tells_those_with_whom_it_was_in_touch(
    who: str, lost: tuple[str, ...], told: tuple[str, ...]
) -> None:
    """Once each, and nobody else: in a large run it has connections with few, and calls nobody at its end."""
    run = Run(6, 3, 6, world=Leaving()).rests()
    for name in lost:
        run[name].kill()
    if lost:
        run.world.until(lambda: run[who].core.phase == "electing")
        run.world.run(1.0)
        assert run[who].core.phase == "electing", "half without the leader waits for the lease"
    run[who].core.leave()
    assert isinstance(run.world, Leaving)
    assert sorted(run.world.told) == [(who, name) for name in told]


def test_a_run_may_begin_again_after_its_end() -> None:
    """By hand, in the same folder: its numbers go on, and all launchers know what the end has left for them."""
    run = Run(3, 2, 3).rests()
    run["n1"].end(failed="n2")
    run.world.run(2.0)
    assert not run.world.alive
    world = run.world
    for name in run.names:
        run.begin(name)
    world.until(lambda: len([one for one in world.alive if one.ranks]) == 3)
    assert [claim.number for _, claim in world.claims] == [1, 2, 3]
    assert all(one.core.inherited == {"failed": "n2"} for one in world.alive)


@pytest.mark.parametrize(
    ("first", "second", "stays"),
    [(JOB.format(0), JOB.format(1), "n4"), (JOB.format(1), JOB.format(0), "n1"), ("r, n1", "r, n4", "n4")],
)
def test_of_two_copies_one_stays(first: str, second: str, stays: str) -> None:
    """The later one, on other nodes, outside Slurm too; but never an older start of the same job, however late."""
    world = World(1)
    run = Run(3, 2, 3, start=first, world=world)
    world.until(run.judge.at_rest)
    names = ("n4", "n5", "n6")
    for name in names:
        Launcher(world, name, names, RunShape(2, 3, names), second)
    copies = {"n1": run.names, "n4": names}
    gone = copies["n1" if stays == "n4" else "n4"]
    world.until(lambda: all(world.launchers[name].left == "overtaken" for name in gone))
    world.run(60.0)
    assert all(world.launchers[name].ranks is not None for name in copies[stays])


def test_a_launcher_that_a_requeue_left_behind_has_no_say() -> None:
    """It was frozen as it claimed: the number counts, but nobody follows it, and the run goes on with the next."""
    world = World(1)
    run = Run(3, 2, 3, start=JOB.format(1), world=world)
    world.until(run.judge.at_rest)
    world.claims.append((world.now, Claim(2, JOB.format(0), "n9-1", plan=claim_of(2, "n2", ("n2",), 0).plan)))
    world.until(lambda: run.judge.at_rest() and len(world.claims) > 2)
    assert (world.claims[-1][1].number, world.claims[-1][1].start) == (3, JOB.format(1))
