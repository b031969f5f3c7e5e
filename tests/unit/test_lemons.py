"""Who is a lemon: on a made-up fleet with planted ones, and on what other clusters have published."""

from __future__ import annotations

import csv
import math
import os
from datetime import datetime
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from opsd.commands.nodes import nodes
from opsd.lemons import DAY_S, WINDOW_S, Fault, judge, lift_of
from opsd.simulate import trace

PUBLISHED = os.environ.get("OPSD_FAULT_TRACE", "")
"""Days 0 to 200 of stepfun-ai/InfiniteHBD-Trace."""
TITAN = os.environ.get("OPSD_TITAN_EVENTS", "")
"""data/gc_full.csv of olcf/TitanGPULife."""


def fleet(seed: int, *, lemons: int, nodes: int = 1000, days: float = 30) -> tuple[list[str], set[str], list[Fault]]:
    """Nodes that fail as those of InfiniteHBD do (4.16 times in 1,000 days), ``lemons`` of them every five days."""
    random = Random(seed)
    names = [f"n{number}" for number in range(nodes)]
    bad = set(random.sample(names, lemons))
    faults = []
    for name in names:
        at = random.expovariate(0.2 if name in bad else 0.00416)
        while at < days:
            faults.append(Fault(name, random.choice(("gpu", "nic", "lost")), at * DAY_S, (at + 0.5) * DAY_S))
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
            Fault(random.choice(names), "gpu", (30 * month + random.uniform(0, 30)) * DAY_S)
            for month, number in enumerate(rates)
            for _ in range(number)
        ),
        key=lambda fault: fault.at,
    )
    lift = lift_of(names, faults, 180 * DAY_S, WINDOW_S, 0.0)
    assert lift.low < 1 < lift.high


def test_a_repair_that_did_not_last_counts_for_more() -> None:
    """The same kind soon after the return, not another kind, and not much later."""
    day = DAY_S
    faults = [
        Fault("a", "gpu", 1 * day, 2 * day), Fault("a", "gpu", 5 * day, 6 * day),
        Fault("b", "gpu", 1 * day, 2 * day), Fault("b", "nic", 5 * day, 6 * day),
        Fault("c", "gpu", 1 * day, 2 * day), Fault("c", "gpu", 20 * day, 21 * day),
    ]  # fmt: skip
    scores = judge(["a", "b", "c", "d"], faults, 30 * day).scores
    assert [(score.node, score.faults, score.relapses) for score in scores] == [("a", 2, 1), ("b", 2, 0), ("c", 2, 0)]


def test_without_faults_nothing_is_known() -> None:
    """Nor with a handful, nor about nodes that are not the cluster's."""
    for faults in ([], [Fault("a", "gpu", 5.0)], [Fault("gone", "gpu", DAY_S), Fault("gone", "gpu", 9 * DAY_S)]):
        judged = judge(["a", "b"], faults, 10 * DAY_S)
        assert (judged.lasting.proven, judged.soon.proven, judged.lemons) == (False, False, ())
        assert judged.lasting.high == math.inf


def test_infinitehbd_has_no_lemons() -> None:
    """Nodes that failed fail sooner again there for a month, and then no more than all others."""
    if not PUBLISHED:
        pytest.skip("OPSD_FAULT_TRACE names no trace")
    outages = trace.load(Path(PUBLISHED), 400).nodes
    names = [f"n{number}" for number in range(len(outages))]
    faults = [
        Fault(name, one.kind, one.start_s, one.end_s if one.ended else None)
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
        Fault(row["location"], row["event"], datetime.fromisoformat(f"{row['remove']}+00:00").timestamp())
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
