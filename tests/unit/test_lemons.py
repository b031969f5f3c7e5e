"""Who is a lemon: on a made-up fleet with planted ones, and on what other clusters have published."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from opsd.collectors.slurm import NodeRecord
from opsd.commands.nodes import nodes
from opsd.launch.run.readiness import is_lemon, known_at_start
from opsd.lemons import DAY_S, WINDOW_S, NodeFailure, judge, lift_of
from opsd.simulate import trace
from opsd.slurm import candidates, node_comment
from opsd.slurm.candidates import lemons_to_spare
from opsd.slurm.job_faults import OWN_S, NodeFaults
from opsd.slurm.node_comment import NodeHistory
from opsd.slurm.port import Node, SlurmUnavailable
from opsd.slurm.topology import Topology
from tests.fakes.clock import FakeClock
from tests.fakes.slurm import FakeSlurm

PUBLISHED = os.environ.get("OPSD_FAULT_TRACE", "")
"""Days 0 to 200 of stepfun-ai/InfiniteHBD-Trace."""
TITAN = os.environ.get("OPSD_TITAN_EVENTS", "")
"""data/gc_full.csv of olcf/TitanGPULife."""


class Asked(FakeSlurm):
    """Counts who asks for the comments of all nodes."""

    of_all = 0

    def comments(self, names: Sequence[str] = ()) -> Mapping[str, str]:
        self.of_all += not names
        return super().comments(names)


def fleet(
    seed: int, *, lemons: int, nodes: int = 1000, days: float = 30
) -> tuple[list[str], set[str], list[NodeFailure]]:
    """Nodes that fail as those of InfiniteHBD do (4.16 times in 1,000 days), ``lemons`` of them every five days."""
    random = Random(seed)
    names = [f"n{number}" for number in range(nodes)]
    bad = set(random.sample(names, lemons))
    faults = []
    for name in names:
        at = random.expovariate(0.2 if name in bad else 0.00416)
        while at < days:
            faults.append(NodeFailure(name, random.choice(("gpu", "nic", "lost")), at * DAY_S, (at + 0.5) * DAY_S))
            at += random.expovariate(0.2 if name in bad else 0.00416)
    return names, bad, faults


def test_planted_lemons_are_found_within_a_month() -> None:
    """One node in a hundred: nearly all of them, and hardly another one."""
    called = right = planted = 0
    for seed in range(20):
        names, bad, faults = fleet(seed, lemons=10)
        found = {score.node for score in judge(names, faults, 30 * DAY_S).lemons}
        called, right, planted = called + len(found), right + len(found & bad), planted + len(bad)
    assert right / called >= 0.9
    assert right / planted >= 0.8


def comments_of(names: list[str], faults: list[NodeFailure]) -> dict[str, str]:
    """What Slurm's comments are after these faults."""
    histories: dict[str, NodeHistory] = {}
    for fault in sorted(faults, key=lambda fault: fault.at):
        assert fault.back is not None
        before = histories.get(fault.node, NodeHistory())
        histories[fault.node] = before.drained(fault.kind, fault.at).returned(fault.back)
    return {name: node_comment.write("", histories.get(name, NodeHistory())) for name in names}


@pytest.mark.parametrize("days", [30, 60, 90])
def test_they_are_found_in_what_comments_remember(days: int) -> None:
    """Which is bounded; and they go on being found, though their faults fill the comments of their nodes."""
    called = right = planted = 0
    for seed in range(5):
        names, bad, faults = fleet(seed, lemons=10, days=days)
        known = candidates.faults(comments_of(names, faults))
        found = {score.node for score in judge(names, known, days * DAY_S).lemons}
        called, right, planted = called + len(found), right + len(found & bad), planted + len(bad)
    assert right / called >= 0.9
    assert right / planted >= 0.8


def test_a_node_knows_that_it_is_a_lemon_and_is_fetched_last_as_a_spare() -> None:
    """The cluster's history says so; only nodes with several faults ask for that of all others, and seldom."""
    names, bad, faults = fleet(1, lemons=10)
    lemon = max(bad, key=lambda name: sum(fault.node == name for fault in faults))
    good = next(name for name in names if all(fault.node != name for fault in faults))
    slurm, clock = Asked([Node(name, "idle") for name in names]), FakeClock()
    slurm.by_comment = comments_of(names, faults)
    records = {name: NodeFaults(slurm, name, clock=clock.monotonic, wall=lambda: 30 * DAY_S) for name in (lemon, good)}
    assert records[good].refresh() == NodeRecord(0, 0.0)
    assert slurm.of_all == 0
    for _ in range(3):
        told = records[lemon].refresh()
        clock.advance(OWN_S)
        assert told.lemon and told.faults >= 2 and (told.confidence or 0) >= 0.9
    assert slurm.of_all == 1
    for name, is_one in ((lemon, True), (good, False)):
        assert is_lemon({"SLURMD_NODENAME": name}, lambda: slurm, lambda: 30 * DAY_S) is is_one
    assert not is_lemon({}, lambda: slurm)
    job = {"SLURM_JOB_ID": "7"}
    known, _ = known_at_start(Topology(), job, lambda: slurm, lambda: 30 * DAY_S)
    assert lemon in known and good not in known
    assert known_at_start(Topology(), {}, lambda: slurm) == (frozenset(), Topology())
    slurm.error = SlurmUnavailable("away")
    assert known_at_start(Topology(), job, lambda: slurm, lambda: 30 * DAY_S) == (frozenset(), Topology())
    slurm.error = None
    nodes = slurm.nodes()
    assert lemons_to_spare(nodes, slurm.by_comment, {lemon, good}, (), 30 * DAY_S) == [lemon]
    assert lemons_to_spare(nodes, slurm.by_comment, {lemon}, (), 30 * DAY_S) == []
    assert lemons_to_spare(nodes, slurm.by_comment, {lemon, good}, {good}, 30 * DAY_S) == []


def test_a_fleet_of_equal_nodes_has_none() -> None:
    """Some fail more than once in a year by chance alone."""
    for seed in range(10):
        names, _, faults = fleet(seed, lemons=0, days=360)
        judged = judge(names, faults, 360 * DAY_S)
        assert not judged.lemons
        assert judged.lasting.low < 1 < judged.lasting.high


def test_a_bad_month_of_all_nodes_is_no_lift() -> None:
    """More faults before and after one moment than at others say nothing about single nodes."""
    random, names = Random(1), [f"n{number}" for number in range(500)]
    rates = (5, 5, 200, 200, 5, 5)
    faults = sorted(
        (
            NodeFailure(random.choice(names), "gpu", (30 * month + random.uniform(0, 30)) * DAY_S)
            for month, number in enumerate(rates)
            for _ in range(number)
        ),
        key=lambda fault: fault.at,
    )
    lift = lift_of(names, faults, 180 * DAY_S, WINDOW_S, 0.0)
    assert lift.low < 1 < lift.high


def test_a_fault_that_comes_back_within_a_fortnight_makes_no_lemon() -> None:
    """Each comes back once, after twelve days, in a history so short that its thirds are shorter than that."""
    for seed in range(10):
        names, _, first = fleet(seed, lemons=0)
        again = [NodeFailure(fault.node, fault.kind, fault.at + 12 * DAY_S) for fault in first]
        judged = judge(names, first + again, 30 * DAY_S)
        assert judged.soon.proven and not judged.lasting.proven


@pytest.mark.parametrize("span_s", [0.0, 1e-9, 1e-6, 14 * DAY_S + 1e-9])
def test_a_history_that_has_just_begun_tells_nothing(span_s: float) -> None:
    """Its windows are of no length, of which there would be millions."""
    judged = judge(["a", "b"], [NodeFailure("a", "gpu", 0.0)], span_s)
    assert not judged.lasting.moments
    assert not judged.soon.proven


def test_an_outage_that_several_tell_of_is_one_fault() -> None:
    """In any order, in words of their own; what happens once the node is back is another, and a relapse."""
    day = DAY_S
    stay = NodeFailure("a", "gpu", 20 * day, 22 * day)
    again = NodeFailure("a", "gpu", 23 * day)
    told = [
        again,
        stay,
        NodeFailure("a", "ticket", 20.5 * day, 21 * day),
        stay,
        NodeFailure("a", "gpu", 21 * day),
        again,
    ]
    (score,) = judge(["a", "b"], told, 30 * day).scores
    assert (score.faults, score.relapses) == (2, 1)
    both = [NodeFailure("a", "job", 5 * day, 5 * day), NodeFailure("a", "job", 5 * day, 5 * day)]
    (score,) = judge(["a", "b"], both, 30 * day).scores
    assert (score.faults, score.relapses) == (1, 0)


def test_a_repair_that_did_not_last_counts_for_more() -> None:
    """The same kind soon after the return, not another kind, and not much later."""
    day = DAY_S
    faults = [
        NodeFailure("a", "gpu", 1 * day, 2 * day), NodeFailure("a", "gpu", 5 * day, 6 * day),
        NodeFailure("b", "gpu", 1 * day, 2 * day), NodeFailure("b", "nic", 5 * day, 6 * day),
        NodeFailure("c", "gpu", 1 * day, 2 * day), NodeFailure("c", "gpu", 20 * day, 21 * day),
    ]  # fmt: skip
    scores = judge(["a", "b", "c", "d"], faults, 30 * day).scores
    assert [(score.node, score.faults, score.relapses) for score in scores] == [("a", 2, 1), ("b", 2, 0), ("c", 2, 0)]


def test_without_faults_nothing_is_known() -> None:
    """Nor with a handful, nor about nodes that are not the cluster's."""
    for faults in (
        [],
        [NodeFailure("a", "gpu", 5.0)],
        [NodeFailure("gone", "gpu", DAY_S), NodeFailure("gone", "gpu", 9 * DAY_S)],
    ):
        judged = judge(["a", "b"], faults, 10 * DAY_S)
        assert (judged.lasting.proven, judged.soon.proven, judged.lemons) == (False, False, ())
        assert judged.lasting.high == math.inf


def test_infinitehbd_has_no_lemons() -> None:
    """Nodes that failed fail sooner again there for a month, and then no more than all others."""
    if not PUBLISHED:
        pytest.skip("OPSD_FAULT_TRACE names no trace")
    outages = trace.parse(Path(PUBLISHED), Path(PUBLISHED).read_text(encoding="utf-8"), 400).nodes
    names = [f"n{number}" for number in range(len(outages))]
    faults = [
        NodeFailure(name, one.kind, one.start_s, one.end_s if one.ended else None)
        for name, several in zip(names, outages, strict=True)
        for one in several
    ]
    for day in range(40, 201, 10):
        assert not judge(names, faults, day * DAY_S).lemons
    judged = judge(names, faults, 200 * DAY_S)
    assert judged.soon.proven
    assert judged.lasting.low < 1 < judged.lasting.high


def test_titan_had_places_that_failed_again() -> None:
    """Double-bit errors and GPUs off the bus, by location."""
    if not TITAN:
        pytest.skip("OPSD_TITAN_EVENTS names no gc_full.csv of olcf/TitanGPULife")
    with open(TITAN, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    faults = [
        NodeFailure(row["location"], row["event"], datetime.fromisoformat(f"{row['remove']}+00:00").timestamp())
        for row in rows
        if row["event"]
    ]
    judged = judge({row["location"] for row in rows}, faults, max(fault.at for fault in faults))
    assert len(faults) == 4826 + 1541
    assert judged.lasting.proven
    assert judged.soon.value > judged.lasting.value > 2


@pytest.mark.parametrize(
    "times", ['"at": NaN', '"at": -1e999', '"at": -5', '"at": 1e3, "back": 1', '"at": 1, "back": NaN']
)
def test_a_history_with_impossible_times_is_one_sentence(tmp_path: Path, times: str) -> None:
    """Before Slurm is asked; a fault since ever would have windows without end."""
    history = tmp_path / "history.jsonl"
    history.write_text(f'{{"node": "n1", "kind": "gpu_xid", {times}}}\n')
    done = CliRunner().invoke(nodes, ["lemons", f"--history={history}"])
    assert "line 1 of" in done.stderr
