"""Launchers of a run in a world of virtual time: who claims, who obeys, and how they recover."""

from __future__ import annotations

import pytest

from opsd.checkpoints.claims import Claim, End
from opsd.launch.claims.messages import Leave, MemberChanges, MemberList, Message, Seek
from opsd.launch.io.protocol import Member
from opsd.launch.run.nodes import RunShape
from tests.fakes.group import JOB, Launcher, Run, World, claim_of

# Launchers of a run in a world of virtual time: who claims, who obeys, and that nobody goes on who was passed over.


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


# The end of a run, its next start, and several copies of one run.


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


# How a group of launchers recovers from faults that once broke it: freezes, outages, stale reads, late claims.


def test_a_forgotten_vote_makes_no_second_side() -> None:
    """1:3: freeze n1, kill n3, n2 goes on alone; freeze n2, thaw n1, restart n3, thaw n2: one side in the end."""
    run = Run(3, 1, 3).rests()
    run["n1"].pause()
    run["n3"].kill()
    run.until_claim(2)
    run.world.run(3.0)
    assert run.slots[-1] == ["n2"]
    run["n2"].pause()
    run["n1"].resume()
    run.world.run(1.0)
    run.begin("n3")
    run.world.run(20.0)
    run["n2"].resume()
    run.rests()
    assert len({one.core.number for one in run.world.alive}) == 1
    assert len({one.core.leader for one in run.world.alive}) == 1


@pytest.mark.parametrize("frozen", ["n1", "n2"])
@pytest.mark.parametrize("frozen_after_s", [0.0, 0.02, 0.06, 0.2, 1.0])
@pytest.mark.parametrize("come_back", [False, True])
def test_a_side_that_freezes_as_it_claims_holds_nobody_up(frozen: str, frozen_after_s: float, come_back: bool) -> None:
    """Kill n3 and n4 of 1:4 and freeze n1 or n2 just after the claim that follows: the rest goes on."""
    run = Run(4, 1, 4).rests()
    for name in ("n3", "n4"):
        run[name].kill()
    run.until_claim(2)
    run.world.run(frozen_after_s)
    run[frozen].pause()
    if come_back:
        run.world.run(1.0)
        for name in ("n3", "n4"):
            run.begin(name)

    def goes_on() -> bool:
        number = run.world.newest.number if run.world.newest else 0
        at_work = [run[name].ranks for name in run.slots[-1]]
        return frozen not in run.slots[-1] and all(ranks and ranks.number == number for ranks in at_work)

    run.world.until(goes_on, 30.0)
    run[frozen].resume()
    run.rests()


def test_who_was_passed_over_obeys_on_waking() -> None:
    """The leader is frozen for a minute: its first act is to look, and it ends its ranks."""
    run = Run(3, 2, 3).rests()
    run["n1"].pause()
    run.world.until(lambda: run.slots[-1] == ["n2", "n3"])
    run.world.run(60.0)
    assert run["n1"].ranks is not None
    run["n1"].resume()
    run.world.run(0.5)
    assert run["n1"].ranks is None
    assert run["n1"].core.phase != "leading"
    run.rests()


@pytest.mark.parametrize("outage_s", [5.0, 25.0, 600.0])
def test_an_outage_of_the_network_costs_nothing(outage_s: float) -> None:
    """Ranks that make progress go on: nobody has claimed anything, and all see that in the folder."""
    run = Run(3, 3, 3).rests()
    for name in run.names:
        run.world.cut([name], run.others(name))
    run.world.run(outage_s)
    assert all(one.ranks is not None for one in run.world.alive)
    run.world.heal()
    run.rests()
    assert len(run.slots) == 1


def test_who_sees_neither_leader_nor_folder_ends_its_ranks() -> None:
    """It may have been passed over, and would not know."""
    run = Run(3, 2, 3).rests()
    run.world.cut(["n3"], ["n1", "n2"])
    run.world.stalled["n3"] = run.world.now + 60.0
    run.world.run(8.0)
    assert run["n3"].ranks is None
    run.world.heal()
    run.rests()


def test_a_file_server_that_pauses_delays_a_recovery_and_nothing_else() -> None:
    """No rank ends for it, a node that is lost meanwhile is replaced when it answers again."""
    run = Run(4, 3, 3).rests()
    run.world.stalled[""] = run.world.now + 60.0
    run.world.run(20.0)
    assert run.judge.at_rest()
    run["n3"].kill(noticed=True)
    run.world.run(30.0)
    assert len(run.slots) == 1
    run.rests()
    assert run.slots[-1] == ["n1", "n2", "n4"]


def test_a_leader_that_can_neither_claim_nor_look_ends_its_ranks() -> None:
    """It has lost the others and the folder: they may have their next generation already."""
    run = Run(3, 1, 3).rests()
    run.world.cut(["n1"], ["n2", "n3"])
    run.world.stalled["n1"] = run.world.now + 60.0
    run.world.run(20.0)
    assert run["n1"].ranks is None
    run.rests()


def test_stale_reads_delay_whoever_has_them() -> None:
    """A node whose view of the folder is a minute old claims nothing twice, and obeys the leader it hears of."""
    run = Run(4, 2, 3).rests()
    run.world.stale["n2"] = (run.world.now, run.world.now + 60.0)
    run["n1"].kill(noticed=True)
    run.world.run(70.0)
    run.rests()
    assert "n1" not in run.slots[-1]


@pytest.mark.parametrize("killed", [True, False])
def test_a_claim_that_lands_late_is_a_claim(killed: bool) -> None:
    """Its maker is dead by then, or leads no more: all obey, or replace, what nobody can lead."""
    run = Run(3, 2, 3).rests()
    run.world.stalled["n1"] = run.world.now + 10.0
    run["n3"].kill(noticed=True)
    run.world.run(0.2)
    if killed:
        run["n1"].kill(noticed=True)
    else:
        run["n1"].pause()
    run.begin("n3")
    run.world.run(12.0)
    if not killed:
        run["n1"].resume()
    run.rests()


def test_a_claim_of_an_earlier_time_as_leader_is_no_surprise() -> None:
    """It lands when its maker leads again what ran before: the new leader's part goes on from it, and nothing waits."""
    run = Run(3, 3, 3).rests()
    run.world.stalled["n1"] = run.world.now + 20.0
    run.world.cut(["n1"], ["n3"])
    run.world.run(3.0)
    run.world.cut(["n1"], ["n2"])
    run.world.run(4.0)
    run.world.cuts.clear()
    run.rests()
    assert run.slots[-1] == ["n1", "n2", "n3"]


@pytest.mark.parametrize("lost_answers", [0.5, 0.9])
def test_answers_that_are_lost_make_no_second_plan(lost_answers: float) -> None:
    """A leader that does not know whether its claim was made finds it, and claims the next if it wants another now."""
    run = Run(4, 3, 3).rests()
    run.world.lost_answers = lost_answers
    for lost in ("n2", "n3"):
        run[lost].kill(noticed=True)
        run.world.run(0.01)
        run.begin(lost)
    run.world.run(20.0)
    run.world.heal()
    run.rests()


@pytest.mark.parametrize("lost", ["", "n1", "n3"])
def test_a_damaged_claim_counts_and_is_replaced(lost: str) -> None:
    """Nobody can follow it: its maker claims the same again, and the ranks run on; if it is dead another claims."""
    run = Run(4, 3, 3).rests()
    before = run["n2"].ranks
    run.world.damage()
    if lost:
        run[lost].kill(noticed=True)
    else:
        run["n4"].kill(noticed=True)
        run.begin("n4")
    run.rests()
    assert run.world.newest is not None and run.world.newest.number == 2
    assert (run["n2"].ranks == before) is not bool(lost)


def test_who_missed_a_generation_ends_its_ranks_for_a_claim_that_keeps_others() -> None:
    """Cut off during generation 2, n1 first sees 3, which keeps the ranks of 2: they are not its own."""
    run = Run(3, 1, 1).rests()
    old = run["n1"]
    assert old.ranks is not None
    run.world.claims.append((run.world.now, claim_of(2, "n2", ("n2",), 0)))
    run.world.claims.append((run.world.now, claim_of(3, "n2", ("n2",), 2)))
    run.world.run(1.5)
    assert old.ranks is None or old.ranks.number > 3
    run.rests()
