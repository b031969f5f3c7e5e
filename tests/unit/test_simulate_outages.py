"""Simulated hangs, broken links, silent corruption, and outages of storage and of Slurm's controller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opsd.settings.policy import PolicySettings
from opsd.simulate.account import Account
from opsd.simulate.cluster import Cluster, VirtualLoop
from opsd.simulate.faults import CLUSTER, DAY_S, HOUR_S, ClusterEffect, Effect, FaultsError, SimulatedFault
from opsd.simulate.job import NAMES, Times, policy
from opsd.simulate.play import Play, Played, Setup
from opsd.simulate.rates import load
from opsd.simulate.supervised import hang_judged_s

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


def play(name: str, *faults: SimulatedFault, setup: Setup = SETUP) -> Played:
    played = Play(policy(name, setup.nodes, inside=2, least=2), setup).run(faults)
    assert sum(played.buckets.values()) == pytest.approx(setup.seconds)
    assert min(played.buckets.values()) >= -1e-6
    return played


def fault(node: int, hour: float, effect: Effect) -> SimulatedFault:
    return SimulatedFault(node, hour * HOUR_S, (hour + 12) * HOUR_S, "gpu", effect)


def outage(effect: ClusterEffect, hour: float, hours: float) -> SimulatedFault:
    return SimulatedFault(CLUSTER, hour * HOUR_S, (hour + hours) * HOUR_S, effect, effect)


def corruption(node: int, hour: float, unnoticed_h: float) -> SimulatedFault:
    at, noticed_s = hour * HOUR_S, unnoticed_h * HOUR_S
    return SimulatedFault(node, at, at + noticed_s + 12 * HOUR_S, "sdc", "corruption", noticed_s=noticed_s)


def test_a_hang_costs_its_judgement_and_a_restart() -> None:
    """By the launchers' own limit and inquiry; the second on the same node is blamed on the node."""
    played = play("hot", fault(2, 5, "hang"))
    judged_s = hang_judged_s(SETUP.step_s)
    assert judged_s == pytest.approx(29.7), "three steps of 10 s, and a little earlier"
    assert played.buckets["detection"] == pytest.approx(judged_s)
    assert played.longest_standstill_s == pytest.approx(judged_s + TIMES.restart_s - TIMES.noticed_s + 30)
    assert (played.swaps, played.outages, play("hot", fault(2, 5, "hang"), fault(2, 9, "hang")).swaps) == (0, 0, 1)
    assert play("torchrun", fault(2, 5, "hang")).longest_standstill_s == pytest.approx(600 + 1.67 + 30)


def test_a_broken_link_restarts_the_ranks_and_the_node_stays() -> None:
    """However often: the leader waits three seconds for another cause and blames no node for a lost connection."""
    played = play("hot", *(fault(2, hour, "link") for hour in (5, 6, 7)))
    assert (played.swaps, played.requeues, played.outages, played.interruptions) == (0, 0, 0, 3)
    assert played.buckets["detection"] == pytest.approx(3 * (TIMES.noticed_s + 3.0))
    assert played.longest_standstill_s == pytest.approx(3.0 + TIMES.restart_s + 30)


@pytest.mark.parametrize("name", ["hot", "torchrun"])
def test_corruption_costs_all_work_since_the_last_checkpoint_before_it(name: str) -> None:
    """Two hours and up to one interval, and a person; of a node without ranks nothing."""
    setup = replace(SETUP, keep=100)
    quiet, played = play(name, setup=setup), play(name, corruption(2, 5, 2), setup=setup)
    assert 2 * HOUR_S - 30 < played.buckets["lost_work"] < 2 * HOUR_S + 601
    assert played.buckets["person"] == pytest.approx(TIMES.person_s)
    assert (played.resubmissions, played.corruptions_kept, played.outages) == (1, 0, 1)
    assert played.gpu_hours_lost["sdc"] > 2 * 4 * 8
    spare = play(name, corruption(5, 5, 2), setup=setup)
    assert spare.buckets["lost_work"] == 0 == quiet.buckets["lost_work"]


def test_corruption_older_than_all_checkpoints_stays() -> None:
    """The run goes back to the oldest of three, two intervals before the newest, and says so."""
    played = play("hot", corruption(2, 5, 2))
    assert 1200 <= played.buckets["lost_work"] < 1801
    assert played.corruptions_kept == 1


def test_corruption_of_a_spare_begins_with_its_ranks() -> None:
    """It replaces a node an hour later; what was saved before that is clean."""
    setup = replace(SETUP, keep=100)
    spare = corruption(4, 5, 3)
    played = play("hot", spare, fault(1, 6, "lost"), setup=setup)
    assert 2 * HOUR_S - 60 < played.buckets["lost_work"] < 2 * HOUR_S + 1200


def test_of_two_corruptions_the_second_ends_where_the_first_went_back_to() -> None:
    """The work at 6 h, when it began, is gone since 8 h: all from 5 h to 10 h is lost, but for a person's way."""
    played = play("hot", corruption(1, 5, 3), corruption(2, 6, 4), setup=replace(SETUP, keep=100))
    assert played.buckets["lost_work"] == pytest.approx(5 * HOUR_S - TIMES.person_s + 0.1 * HOUR_S, abs=0.2 * HOUR_S)


def test_steps_are_counted_from_where_a_run_went_back_to() -> None:
    """A failure after that is none without progress: the steps beyond it were never right."""
    account = Account(600.0, 1.0)
    account.work(0.0, 1.0)
    account.idle(6010.0, "person")
    assert account.steps(10.0, 6010.0) == (600, 600)
    account.rewind(1200.0, "sdc")
    assert account.steps(10.0, 6010.0) == (120, 120)


def test_an_outage_of_storage_alone_stops_nothing() -> None:
    """Checkpoints are staged in memory; the one that waits is written when the storage is back."""
    for name in ("hot", "torchrun"):
        assert play(name, outage("storage", 5, 1)).buckets == play(name).buckets


def test_no_start_ends_before_the_storage_is_back() -> None:
    """And it begins with the last checkpoint from before the outage, half an hour ago; later ones are safe again."""
    played = play("hot", outage("storage", 5, 1), fault(1, 5.5, "lost"))
    assert played.swaps == 1
    assert played.longest_standstill_s == pytest.approx(HOUR_S / 2 + TIMES.program_s)
    assert HOUR_S / 2 - 30 < played.buckets["lost_work"] < HOUR_S / 2 + 601
    loading = play("hot", fault(1, 5, "lost"), SimulatedFault(CLUSTER, 5 * HOUR_S + 10, 6 * HOUR_S, "nfs", "storage"))
    assert loading.longest_standstill_s == pytest.approx(HOUR_S), "the ranks had been started, and could not load"
    torchrun = play("torchrun", outage("storage", 5, 1), fault(1, 5.5, "process"))
    assert torchrun.longest_standstill_s == pytest.approx(HOUR_S / 2)
    assert 0 < play("hot", outage("storage", 5, 1), fault(1, 7, "lost")).buckets["lost_work"] < 601


def test_outages_that_overlap_end_with_the_last() -> None:
    """And checkpoints are safe again after that."""
    away = [outage("storage", 5, 1), outage("storage", 5.5, 1.5), outage("storage", 5.6, 0.1)]
    assert play("hot", *away, fault(1, 6.5, "lost")).longest_standstill_s == pytest.approx(HOUR_S / 2 + 30)
    assert 0 < play("hot", *away, fault(1, 9, "lost")).buckets["lost_work"] < 601


def test_a_planned_swap_waits_for_its_checkpoint_as_long_as_a_stop_may_last() -> None:
    """A minute, or two minutes and then from the last checkpoint."""
    short, long = outage("storage", 5, 1 / 60), outage("storage", 5, 1)
    waited = play("hot", short, fault(1, 5, "degraded"))
    assert (waited.swaps, waited.buckets["lost_work"]) == (1, 0)
    assert waited.longest_standstill_s < 60 + 60
    killed = play("hot", long, fault(1, 5, "degraded"))
    assert killed.swaps == 1
    assert killed.buckets["lost_work"] > 0
    assert HOUR_S - 60 < killed.longest_standstill_s < HOUR_S + TIMES.program_s


def test_only_what_needs_slurm_waits_for_its_controller() -> None:
    """A swap with a spare inside does not, a requeue and a node from the pool do."""
    away, lost = outage("controller", 5, 1), fault(1, 5.5, "lost")
    assert play("hot", away, lost).buckets == play("hot", lost).buckets
    for name in ("requeue", "pool", "torchrun"):
        assert play(name, away).buckets == play(name).buckets
    requeued, fetched = play("requeue", away, lost), play("pool", away, lost)
    assert requeued.requeues == 1
    assert requeued.longest_standstill_s == pytest.approx(HOUR_S / 2 + TIMES.change_s + TIMES.program_s)
    assert requeued.buckets["queue"] > HOUR_S / 2 - 10
    assert fetched.longest_standstill_s == pytest.approx(HOUR_S / 2, abs=60)


def test_drains_and_returns_wait_for_the_controller() -> None:
    """Of a node that breaks and is repaired, each while Slurm does not answer."""
    loop, returned = VirtualLoop(), list[str]()
    cluster = Cluster(4, loop, PolicySettings(max_drained_share=0.5), 60.0, returned.append)
    broken = SimulatedFault(0, 0.0, 250.0, "gpu", "hardware")
    cluster.goes_away("controller", SimulatedFault(CLUSTER, 0.0, 100.0, "slurmctld", "controller"))
    cluster.breaks("n00001", broken)
    assert "n00001" in cluster.usable()
    loop.run(101.0)
    assert "n00001" not in cluster.usable()
    cluster.goes_away("controller", SimulatedFault(CLUSTER, 101.0, 300.0, "slurmctld", "controller"))
    loop.run(250.0)
    cluster.repaired("n00001")
    loop.run(299.0)
    assert ("n00001" in cluster.usable(), returned) == (False, [])
    loop.run(301.0)
    assert ("n00001" in cluster.usable(), returned) == (True, ["n00001"])


RATES = """
[[fault]]
kind = "nic"
effect = "link"
per_1000_node_days = 2.0
burst = 4
apart_s = 300

[[fault]]
kind = "nccl"
effect = "hang"
per_1000_node_days = 3.0

[[fault]]
kind = "sdc"
effect = "corruption"
per_1000_node_days = 1.0
noticed_p50_h = 3
noticed_p90_h = 24

[[fault]]
kind = "gpu"
effect = "hardware"
per_1000_node_days = 3.0

[[outage]]
kind = "lustre"
effect = "storage"
per_1000_days = 100
repair_p50_h = 0.5
repair_p90_h = 4

[[outage]]
kind = "slurmctld"
effect = "controller"
per_1000_days = 100
repair_p50_h = 0.2
repair_p90_h = 2
"""


def rates(tmp_path: Path, text: str = RATES) -> Path:
    file = tmp_path / "rates.toml"
    file.write_text(text)
    return file


def test_rates_have_bursts_and_outages(tmp_path: Path) -> None:
    """As many as they say, the same outages for every size of the cluster."""
    source = load(rates(tmp_path))
    drawn = source.draw(1000, 100 * DAY_S, 1)
    links = [one for one in drawn if one.effect == "link"]
    assert len(links) == pytest.approx(800, rel=0.2)
    assert source.per_node_day == pytest.approx((2 * 4 + 3 + 1 + 3) / 1000)
    away = [one for one in drawn if one.node == CLUSTER]
    assert {one.effect for one in away} == {"storage", "controller"}
    assert len(away) == pytest.approx(20, abs=12)
    assert away == [one for one in source.draw(10, 100 * DAY_S, 1) if one.node == CLUSTER]
    silent = sorted(one.noticed_s / HOUR_S for one in drawn if one.effect == "corruption")
    assert silent[len(silent) // 2] == pytest.approx(3, rel=0.6)


@pytest.mark.parametrize("name", NAMES)
def test_the_buckets_sum_to_the_wall_clock_under_all_of_them(name: str, tmp_path: Path) -> None:
    """For every policy."""
    setup = replace(SETUP, nodes=30, spares=6, seconds=40 * DAY_S)
    drawn = load(rates(tmp_path)).draw(36, setup.seconds, 3)
    assert len({one.effect for one in drawn}) == 6
    assert 0.3 < play(name, *drawn, setup=setup).ettr < 1


def test_a_corruption_says_when_it_is_noticed(tmp_path: Path) -> None:
    """Nothing else is assumed."""
    with pytest.raises(FaultsError, match="sdc is a corruption: give noticed_p50_h"):
        load(rates(tmp_path, RATES.replace("noticed_p50_h = 3\n", "")))
