"""Launchers of a run in a world of virtual time: who claims, who obeys, and that nobody goes on who was passed over."""

from __future__ import annotations

import pytest

from opsd.checkpoints.claims import End
from opsd.launch.claims.messages import MemberChanges, MemberList, Message, Seek
from opsd.launch.io.protocol import Member
from tests.fakes.group import Launcher, World
from tests.fakes.group_run import Run


@pytest.mark.parametrize("launchers", range(1, 9))
def test_a_run_begins(launchers: int) -> None:
    """Within a second once all have come, with one claim, by the first of them; the rest are spares."""
    run = Run(launchers, 1, max(1, launchers - 1))
    assert run.until_claim(1) < 1.0
    run.rests()
    assert run.slots == [list(run.names[: max(1, launchers - 1)])]
    assert run.leader == "n1"


@pytest.mark.parametrize("launchers", range(1, 9))
def test_nothing_disturbs_a_healthy_run(launchers: int) -> None:
    """Ten minutes without a fault are ten minutes without a claim."""
    run = Run(launchers, max(1, launchers // 2), launchers).rests()
    run.world.run(600.0)
    assert (len(run.slots), run.judge.at_rest()) == (1, True)


def test_a_run_waits_for_those_that_it_needs() -> None:
    """Nobody claims before; of those that may come it begins without the last after two seconds."""
    run = Run(4, 3, 4)
    for name in ("n3", "n4"):
        run[name].kill()
    run.world.run(60.0)
    assert run.slots == []
    run.begin("n3")
    assert 1.5 < run.until_claim(1) < 3.5
    assert run.rests().slots == [["n1", "n2", "n3"]]


@pytest.mark.parametrize("lost", ["n1", "n2", "n3"])
@pytest.mark.parametrize("noticed", [False, True])
def test_a_loss_is_answered_by_the_next_generation(lost: str, noticed: bool) -> None:
    """Leader or follower: a spare takes its place, at once if its machine says that it is gone, else in seconds."""
    run = Run(4, 3, 3).rests()
    run[lost].kill(noticed=noticed)
    took = run.until_claim(2)
    assert took < (1.0 if noticed else 3.5)
    run.rests()
    assert run.slots[-1] == [name if name != lost else "n4" for name in ("n1", "n2", "n3")]


def test_a_leader_that_runs_no_ranks_costs_no_restart() -> None:
    """Its node was taken out of the run; when it dies its successor claims that it leads on, and the ranks run on."""
    run = Run(4, 2, 3).rests()
    run["n1"].core.propose(("n2", "n3"), {"keep": 0})
    run.rests()
    assert (run.leader, run["n1"].ranks) == ("n1", None)
    before = run["n2"].ranks, run["n3"].ranks
    run["n1"].kill()
    run.rests()
    assert (run.leader, run.kept) == ("n2", [0, 0, 2])
    assert (run["n2"].ranks, run["n3"].ranks) == before


def test_a_tie_goes_on_with_the_holder_of_the_claim() -> None:
    """Two of four on each side: the leader's half at once, the other half not while the leader's renews its lease."""
    run = Run(4, 1, 4).rests()
    run.world.cut(["n1", "n2"], ["n3", "n4"])
    run.world.until(run.judge.at_rest)
    run.world.run(30.0)
    assert {tuple(slots) for slots in run.slots[1:]} == {("n1", "n2")}
    assert run["n3"].ranks is None and run["n4"].ranks is None


@pytest.mark.parametrize("lost", [("n1", "n2"), ("n1", "n3"), ("n1", "n4")])
def test_half_without_the_leader_waits_for_the_lease(lost: tuple[str, str]) -> None:
    """The leader may just be unreachable; only a lease that nobody renews for ten seconds tells otherwise."""
    run = Run(4, 1, 4).rests()
    for name in lost:
        run[name].kill()
    took = run.until_claim(2)
    assert 4.0 < took < 10.0
    run.rests()
    assert sorted(run.slots[-1]) == sorted(run.others(*lost))


def test_half_that_hears_the_others_are_gone_waits_for_nobody() -> None:
    """Their machines say so."""
    run = Run(4, 1, 4).rests()
    for name in ("n1", "n2"):
        run[name].kill(noticed=True)
    assert run.until_claim(2) < 1.5
    run.rests()


def test_the_last_one_goes_on_alone() -> None:
    """If the run may have one node: after the lease has run out."""
    run = Run(4, 1, 4).rests()
    for name in ("n1", "n2", "n3"):
        run[name].kill()
    assert run.until_claim(2) < 15.0
    run.rests()
    assert run.slots[-1] == ["n4"]


def test_one_of_two_begins_alone_if_the_other_does_not_come() -> None:
    """Where one is enough; should the other one come after all, it follows."""
    run = Run(2, 1, 2)
    run["n1"].pause()
    assert 29.0 < run.until_claim(1, 60.0) < 40.0
    assert run.slots == [["n2"]]
    run["n1"].resume()
    run.rests()
    assert run.leader == "n2"


def test_too_few_never_claim() -> None:
    """They wait, and go on once enough are back; nobody's state but the folder's is needed."""
    run = Run(3, 2, 3).rests()
    for name in ("n1", "n2"):
        run[name].kill()
    run.world.run(120.0)
    assert all(not slots for slots in run.slots[1:])
    run.begin("n1")
    run.rests()
    assert sorted(run.slots[-1]) == ["n1", "n3"]


def test_all_begin_again_after_all_were_killed() -> None:
    """None of them has any state: the folder has, and the next generation follows the last."""
    run = Run(4, 4, 4).rests()
    for name in run.names:
        run[name].kill()
    for name in run.names:
        run.begin(name)
    run.rests()
    assert run.world.newest is not None and run.world.newest.number == 2


@pytest.mark.parametrize("lost", ["n1", "n3"])
@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.3, 1.0, 2.5])
def test_a_launcher_that_comes_back_never_begins_what_began_without_it(lost: str, delay_s: float) -> None:
    """However soon: its ranks are gone, so the generation that runs is over. (The judge knows who began what.)"""
    run = Run(3, 3, 3).rests()
    run[lost].kill()
    run.world.run(delay_s)
    run.begin(lost)
    run.rests()
    assert (len(run.slots) >= 2, run[lost].ranks is not None) == (True, True)


def test_who_leaves_is_no_company_for_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has ended, and its launchers stay a second longer: one that comes only now does not go on with them."""
    monkeypatch.setattr(Launcher, "over", lambda self, end: setattr(self, "ranks", None))
    run = Run(3, 2, 2).rests()
    run["n1"].end()
    run.world.run(1.0)
    run["n3"].kill(noticed=True)
    run.begin("n3")
    run.world.run(20.0)
    assert run.world.newest is not None
    assert run.world.newest.end == End(0, "done")


def test_a_slow_claim_loses_nobody() -> None:
    """Who has not been asked for as long as it took is not silent; one answer that comes late costs no restart."""
    run = Run(4, 2, 3).rests()
    run["n1"].core.propose(("n2", "n3"), {"keep": 0})
    run.rests()
    before = run["n2"].ranks, run["n3"].ranks
    run.world.stalled[""] = run.world.now + 4.0
    run["n1"].kill(noticed=True)
    run.world.run(3.5)
    run.world.cut(["n3"], ["n2", "n4"], one_way=True)
    run.until_claim(3)
    run.world.run(0.5)
    run.world.cuts.clear()
    run.rests()
    assert run.kept == [0, 0, 2]
    assert (run["n2"].ranks, run["n3"].ranks) == before


def test_a_leader_that_seemed_gone_is_found_again() -> None:
    """Its machine had said that it is not there, and by the time it could be heard again it had given the other up."""
    run = Run(2, 2, 2).rests()
    run.world.cut(["n1"], ["n2"])
    run["n2"].pause()
    run.until_claim(2)
    run["n2"].resume()
    run.world.run(1.5)
    run["n2"].core.unreachable(run.world.now, "n1")
    run.world.run(5.0)
    run.world.cuts.clear()
    run.world.until(lambda: run["n2"].core.leader == "n1", 3.0)
    assert run.rests().slots == [["n1", "n2"], [], ["n1", "n2"]]


def test_a_claim_whose_answer_is_lost_is_made_once() -> None:
    """A look shows that it stands: made again it would restart the ranks that have just begun."""
    run = Run(3, 2, 2).rests()
    run.world.lost_answers = 1.0
    run["n2"].kill(noticed=True)
    run.until_claim(2)
    run.world.run(5.0)
    assert run.slots == [["n1", "n2"], ["n1", "n3"]]


class Counting(World):
    """Counts who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def send(self, source: str, target: Member, message: Message) -> None:
        self.asked += isinstance(message, Seek)
        super().send(source, target, message)


@pytest.mark.parametrize(("lost", "within_s"), [(1, 2.5), (12, 6.0)])
def test_many_launchers_lose_their_leader(lost: int, within_s: float) -> None:
    """And perhaps the rack around it: all others go on at once, and none of them has to ask them all."""
    world = Counting()
    run = Run(128, 64, 128, world=world).rests()
    assert run.leader == "n1"
    before = world.asked
    for number in range(1, lost + 1):
        run[f"n{number}"].pause()
    newest = len(run.slots)
    assert run.until_claim(newest + 1) < within_s
    world.run(1.0)
    assert len(run.slots[newest]) == 128 - lost
    assert world.asked - before < 128 * 80


def test_who_has_read_the_claim_is_not_told_who_is_there() -> None:
    """It is a long list in a large run, and the claim has it; a spare that comes is told to all, and nobody else."""
    told: list[MemberList | MemberChanges] = []

    class Listening(World):
        def send(self, source: str, target: Member, message: Message) -> None:
            if isinstance(message, MemberList | MemberChanges):
                told.append(message)
            super().send(source, target, message)

    run = Run(4, 3, 3, world=Listening()).rests()
    told.clear()
    run["n2"].kill()
    run.until_claim(len(run.slots) + 1)
    run.rests()
    assert [listed for listed in told if listed.number == len(run.slots)] == []
    Launcher(run.world, "n2", run.names, run.shape)
    run.world.run(5.0)
    changes = [news for news in told if isinstance(news, MemberChanges)]
    assert changes and all([one.name for one in news.joined] == ["n2"] and news.left == () for news in changes)
    assert all(len(one.core.members) == 4 for one in run.world.alive)
