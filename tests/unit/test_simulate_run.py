"""Simulated runs: the decisions are those of production, and the time adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from opsd.settings.policy import PolicySettings
from opsd.simulate.account import Account
from opsd.simulate.faults import DAY_S, HOUR_S, Effect, SimulatedFault
from opsd.simulate.job import NAMES, STEP_S, Times, policy
from opsd.simulate.play import Play, Played, Setup
from opsd.simulate.rates import published
from opsd.simulate.study import Draws, knee, sweep
from opsd.slurm.topology import parse

TIMES = Times(program_s=30.0)
SETUP = Setup(
    nodes=4,
    spares=2,
    seconds=DAY_S,
    interval_s=600.0,
    stall_s=1.0,
    times=TIMES,
    rules=PolicySettings(max_drained_share=0.5),
)


def fault(node: int, hour: float, effect: Effect, hours: float = 12.0) -> SimulatedFault:
    return SimulatedFault(node, hour * HOUR_S, (hour + hours) * HOUR_S, "gpu", effect)


def play(name: str, *faults: SimulatedFault, setup: Setup = SETUP, **shape: Any) -> Played:
    chosen = policy(name, setup.nodes, **{"inside": 2, "least": 2, **shape})
    return Play(chosen, setup).run(faults)


@pytest.mark.parametrize("name", NAMES)
def test_the_buckets_sum_to_the_wall_clock(name: str) -> None:
    """Under faults of every kind, and no bucket is negative."""
    setup = replace(SETUP, nodes=30, spares=6, seconds=40 * DAY_S)
    played = Play(policy(name, 30, inside=3, least=27), setup).run(published("rsc1").draw(36, setup.seconds, 3))
    assert sum(played.buckets.values()) == pytest.approx(setup.seconds)
    assert min(played.buckets.values()) >= -1e-6
    assert 0.3 < played.ettr < 1


def test_a_quiet_run_loses_only_its_start_and_its_saves() -> None:
    """One second in 601, after the first generation and its program have begun."""
    played = play("hot")
    begun_s = TIMES.change_s + TIMES.program_s
    assert played.buckets["restart"] == pytest.approx(begun_s)
    assert played.buckets["checkpoint"] == pytest.approx((DAY_S - begun_s) / 601, abs=1.5)
    assert (played.swaps, played.requeues, played.buckets["lost_work"]) == (0, 0, 0)


def test_a_lost_node_costs_detection_a_start_and_the_work_since_the_last_save() -> None:
    """A spare inside the job takes its place: no queue, nobody waits."""
    quiet, played = play("hot"), play("hot", fault(1, 5, "lost"))
    assert (played.swaps, played.requeues, played.outages) == (1, 0, 1)
    assert played.buckets["detection"] == pytest.approx(TIMES.silence_s)
    assert played.buckets["restart"] - quiet.buckets["restart"] == pytest.approx(TIMES.change_s + TIMES.program_s)
    assert 0 < played.buckets["lost_work"] < 600
    assert played.longest_standstill_s == pytest.approx(TIMES.swap_s + TIMES.program_s)


def test_the_loss_of_the_leader_is_no_other_thing() -> None:
    """Its successor goes on from what the claim says."""
    played = play("hot", fault(0, 5, "lost"), fault(1, 6, "lost"))
    assert (played.swaps, played.requeues) == (2, 0)
    assert played.longest_standstill_s == pytest.approx(TIMES.succession_s + TIMES.program_s)


def test_failed_hardware_is_replaced_and_a_dead_process_is_not() -> None:
    """As the health of nodes has it: the second death on the same node is blamed on the node."""
    assert play("hot", fault(2, 5, "hardware")).swaps == 1
    assert play("hot", fault(2, 5, "process")).swaps == 0
    assert play("hot", fault(2, 5, "process"), fault(2, 9, "process")).swaps == 1


def test_a_launcher_that_dies_takes_its_node_from_this_start_alone() -> None:
    """A spare takes the place; without one the job starts again on another node, and nothing is there to repair."""
    hot, cold = play("hot", fault(1, 5, "launcher")), play("requeue", fault(1, 5, "launcher"))
    assert (hot.swaps, hot.requeues, hot.outages) == (1, 0, 0)
    assert hot.longest_standstill_s == pytest.approx(TIMES.closed_s + TIMES.change_s + TIMES.program_s)
    assert (cold.swaps, cold.requeues, cold.outages) == (0, 1, 0)
    fetched = play("pool", *(fault(1, hour, "launcher") for hour in (5, 6)), setup=replace(SETUP, spares=1))
    assert (fetched.swaps, fetched.requeues) == (1, 0), "nothing runs on node 1 any longer, but the job has it"


def test_a_requeue_waits_until_slurm_has_noticed_the_death_of_the_batch_host() -> None:
    """An ordinary user may not take it down; later, in the same start, that time is over."""
    follower, batch_host = play("requeue", fault(1, 5, "lost")), play("requeue", fault(0, 5, "lost"))
    longer_s = batch_host.longest_standstill_s - follower.longest_standstill_s
    assert longer_s == pytest.approx(TIMES.slurm_notices_s, abs=5)
    swapped = play("hot", fault(0, 5, "lost"), fault(1, 6, "lost"), inside=1)
    assert (swapped.swaps, swapped.requeues) == (1, 1)
    assert swapped.longest_standstill_s < 60 + TIMES.program_s


def test_the_helper_of_a_requeue_costs_no_spare() -> None:
    """Five nodes are left, and the job starts on all of them once the helper has ended: the next loss is a swap."""
    losses = [fault(node, hour, "lost") for node, hour in ((1, 5), (2, 5), (3, 6))]
    played = play("hot", *losses, setup=replace(SETUP, spares=3), inside=1)
    assert (played.swaps, played.requeues) == (1, 1)


def test_a_broken_node_may_break_worse() -> None:
    """One that should be replaced, and cannot be, dies; it is one outage, which lasts until both faults are over."""
    alone = replace(SETUP, spares=0)
    worse = play("requeue", fault(1, 5, "degraded", 8), fault(1, 6, "lost", 2), setup=alone)
    assert (worse.outages, worse.requeues) == (1, 1)
    assert worse.longest_standstill_s == pytest.approx(7 * HOUR_S, rel=0.01)
    milder = play("requeue", fault(1, 5, "lost", 8), fault(1, 6, "degraded", 20), setup=alone)
    assert (milder.outages, milder.requeues) == (1, 1)
    assert milder.longest_standstill_s == pytest.approx(8 * HOUR_S, rel=0.01)


def test_a_planned_swap_loses_no_work() -> None:
    """The ranks save at a step boundary first."""
    played = play("hot", fault(2, 5, "degraded"))
    assert (played.swaps, played.buckets["lost_work"]) == (1, 0)


def test_a_slow_node_slows_all_until_it_is_found() -> None:
    """Opsd swaps it after some steps; torchrun runs at its speed until it is repaired, and where there is no spare."""
    slow = SimulatedFault(2, 5 * HOUR_S, 7 * HOUR_S, "thermal", "degraded", speed=0.5)
    assert play("hot", slow).buckets["slow_nodes"] == pytest.approx((TIMES.agent_s + 50) / 2, abs=STEP_S)
    torchrun, alone = play("torchrun", slow), play("requeue", slow, setup=replace(SETUP, spares=0))
    for played in (torchrun, alone):
        assert played.buckets["slow_nodes"] == pytest.approx(HOUR_S, rel=0.01)
        assert sum(played.buckets.values()) == pytest.approx(DAY_S)
    assert torchrun.swaps == 0


def test_work_at_half_the_speed_is_lost_like_other_work() -> None:
    """Since the last checkpoint; what was saved before counts by the speed of its time."""
    account = Account(100.0, 0.0)
    account.work(0.0, 1.0)
    account.pace(150.0, 0.5)
    account.idle(250.0, "detection", "gpu")
    account.close(250.0)
    seconds = account.seconds
    assert (seconds["productive"], seconds["slow_nodes"], seconds["lost_work"]) == (175.0, 25.0, 50.0)
    assert account.steps(1.0, 250.0) == (200, 175)


def test_a_switch_takes_its_nodes_at_once() -> None:
    """And the run goes on with as many spares, in one restart, or waits for the switch."""
    hit = [SimulatedFault(node, 5 * HOUR_S, 8 * HOUR_S, "switch", "lost") for node in (1, 2)]
    played = play("hot", *hit)
    assert (played.swaps, played.requeues) == (2, 0)
    assert played.longest_standstill_s < 60 + TIMES.program_s
    pool = Setup(nodes=20, spares=8, seconds=DAY_S, interval_s=600.0, stall_s=1.0, times=TIMES)
    leaders = play(
        "pool", *(SimulatedFault(node, 5 * HOUR_S, 8 * HOUR_S, "switch", "lost") for node in range(4)), setup=pool
    )
    assert (leaders.swaps, leaders.requeues) == (4, 0), "the leader among them"
    three = play("hot", *hit, SimulatedFault(3, 5 * HOUR_S, 8 * HOUR_S, "switch", "lost"))
    assert three.longest_standstill_s == pytest.approx(3 * HOUR_S, rel=0.05)


def test_without_spares_inside_the_job_goes_through_the_queue() -> None:
    """Opsd's way, and Slurm's own, which takes minutes."""
    ours, slurm = play("requeue", fault(1, 5, "lost")), play("torchrun", fault(1, 5, "lost"))
    assert (ours.requeues, slurm.requeues) == (1, 1)
    assert ours.longest_standstill_s == pytest.approx(TIMES.requeue_s + TIMES.program_s)
    assert slurm.longest_standstill_s > 60 + ours.longest_standstill_s
    assert slurm.ettr < ours.ettr


def test_a_requeue_does_not_wait_for_spares() -> None:
    """The second loss finds no spare inside the job; four nodes are left in the cluster, and the run needs four."""
    played = play("hot", fault(0, 1, "lost"), fault(1, 2, "lost"), inside=1)
    assert (played.swaps, played.requeues) == (1, 1)
    assert played.buckets["waiting"] < 10


def test_hardware_that_nobody_can_replace_costs_no_persons_time() -> None:
    """The job waits in the queue for the repair, instead of giving up on the broken node."""
    played = play("requeue", fault(1, 5, "hardware", hours=2), setup=replace(SETUP, spares=0))
    assert (played.requeues, played.resubmissions) == (1, 0)
    assert played.buckets["waiting"] == pytest.approx(2 * HOUR_S, rel=0.02)


def test_a_pool_serves_until_it_is_empty() -> None:
    """The third loss has no node: the run waits, goes into the queue, and starts when a node is repaired."""
    losses = [fault(node, 1 + node, "lost") for node in range(3)]
    assert (play("pool", *losses[:2]).swaps, play("pool", *losses[:2]).requeues) == (2, 0)
    played = play("pool", *losses)
    assert played.requeues == 1
    assert played.longest_standstill_s == pytest.approx(10 * HOUR_S, rel=0.01), "from hour 3 to 13"
    assert played.buckets["waiting"] > 9 * HOUR_S
    assert played.gpu_hours_lost["gpu"] > 9 * 4 * 8


def test_a_run_may_go_on_with_fewer_nodes() -> None:
    """At three quarters of its speed."""
    losses = [fault(node, 1 + node, "lost", 30) for node in range(3)]
    played = play("shrink", *losses)
    assert played.buckets["waiting"] == 0
    assert played.buckets["fewer_nodes"] == pytest.approx(played.buckets["productive"] * 21 / 72, rel=0.1)


def test_a_run_that_shrank_grows_when_nodes_are_there_again() -> None:
    """Half an hour or so after the repair: a quarter of 60 s is missed in four minutes, then comes a checkpoint."""
    losses = [fault(node, 1, "lost", 2) for node in range(3)]
    setup = replace(SETUP, spares=2)
    played = play("shrink", *losses, setup=setup, least=3)
    missing_s = played.buckets["fewer_nodes"] / 0.25
    assert 2 * HOUR_S < missing_s < 2.5 * HOUR_S
    assert (played.buckets["person"], played.requeues) == (0, 0)


def test_nodes_beyond_the_budget_are_not_drained() -> None:
    """The rules of `opsd drain`: one node always, here no more."""
    strict = replace(SETUP, rules=PolicySettings(max_drained_share=0.01))
    played = play("hot", fault(4, 5, "hardware"), fault(5, 6, "hardware"), setup=strict)
    assert played.drains_refused == 1
    assert play("hot", fault(4, 5, "hardware"), fault(5, 6, "hardware")).drains_refused == 0


def test_more_spares_never_hurt_much_and_the_knee_is_found() -> None:
    """The same faults for each number of spares."""
    draws = Draws(published("rsc1"), 26, 30 * DAY_S, range(4))
    setup = replace(SETUP, nodes=20, seconds=30 * DAY_S)
    counts = range(7)
    studies = sweep(draws, [policy("pool", 20, inside=0, least=20)] * len(counts), setup, counts)
    ettrs = [study.ettr for study in studies]
    assert ettrs[0] < ettrs[3] <= ettrs[6] + 0.01
    assert 1 <= knee(studies) <= 6
    low, high = studies[2].ettr_range
    assert low <= studies[2].ettr <= high
    assert studies[2].as_dict() == sweep(draws, [studies[2].policy], setup, [2])[0].as_dict(), "nothing is random"


def test_swaps_are_told_in_hops() -> None:
    """Three nodes below each leaf: the spare is farther from two of the others, and nearer to one."""
    played = play("hot", fault(0, 2, "lost"), setup=replace(SETUP, per_switch=3))
    ((before, after),) = played.hops
    assert (before, after) == (pytest.approx(5 / 3), pytest.approx(7 / 3))
    assert play("hot", fault(0, 2, "lost")).hops == []


def test_the_cluster_may_be_a_real_tree() -> None:
    """The first four nodes of the file train, below two leaves; the first spare is beside none of them."""
    tree = parse(
        "SwitchName=a Nodes=x[1-3]\nSwitchName=b Nodes=x4\nSwitchName=c Nodes=x[5-9]\nSwitchName=s Switches=a,b,c"
    )
    ((before, after),) = play("hot", fault(0, 2, "lost"), setup=replace(SETUP, topology=tree)).hops
    assert (before, after) == (pytest.approx(5 / 3), 3.0)
