"""How a group of launchers recovers from faults that once broke it: freezes, outages, stale reads, late claims."""

from __future__ import annotations

import pytest

from tests.fakes.group_run import Run, claim_of


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
