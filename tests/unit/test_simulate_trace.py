"""Faults for the simulator: traces, rates, and what can be said of them without a run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from opsd.simulate import history, rates
from opsd.simulate.faults import (
    DAY_S,
    HOUR_S,
    PASSING,
    FaultsError,
    SimulatedFault,
    down_at_once,
    level_at,
    spares_needed,
)
from opsd.simulate.trace import Trace

PUBLISHED = os.environ.get("OPSD_FAULT_TRACE", "")
"""Days 0 to 200 of stepfun-ai/InfiniteHBD-Trace."""


def outages_per_1000_node_days(faults: Iterable[SimulatedFault], nodes: int, seconds: float) -> float:
    """Outages that begin within ``seconds``."""
    begun = sum(fault.effect not in PASSING and 0 <= fault.start_s < seconds for fault in faults)
    return begun / (nodes * seconds / DAY_S) * 1000


def repair_quantile(repairs: Sequence[tuple[float, bool]], share: float) -> float:
    """The repair time in seconds that ``share`` of the outages do not exceed, infinity if too few have ended.

    ``repairs`` are durations, and whether the outage ended then or was only not seen any longer (Kaplan and Meier
    1958).
    """
    left, lasting = len(repairs), 1.0
    for lasted, ended in sorted(repairs, key=lambda repair: (repair[0], not repair[1])):
        if ended:
            lasting *= 1 - 1 / left
            if lasting <= 1 - share + 1e-9:
                return lasted
        left -= 1
    return math.inf


def event(node: str, day: float, what: str, kind: str = "GPU") -> dict[str, Any]:
    return {"node_id": node, "event_time": day, "event_type": f"fault_{what}", "fault_type": {"Class": kind}}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Ten days of four nodes, two of which fail."""
    path = tmp_path / "trace.json"
    events = [
        event("a", 1, "start"), event("b", 2, "start", "Fan"), event("a", 3, "end"), event("b", 2.5, "end", "Fan"),
        event("a", 9, "start"), event("b", 9.5, "start", "Power Supply"), event("b", 9.75, "end", "Power Supply"),
    ]  # fmt: skip
    path.write_text(json.dumps(events))
    return path


@pytest.fixture(scope="module")
def published() -> Trace:
    if not PUBLISHED:
        pytest.skip("OPSD_FAULT_TRACE names no trace")
    return history.load(Path(PUBLISHED), 400)


def test_a_trace_is_read_with_its_healthy_nodes(small: Path) -> None:
    """An outage that the trace does not see end lasts to its own end, and is known not to have ended."""
    found = history.load(small, 4)
    assert (len(found.nodes), found.span_s / DAY_S) == (4, 10)
    assert [(o.start_s / DAY_S, o.end_s / DAY_S, o.effect, o.ended) for node in found.nodes for o in node] == [
        (1, 3, "hardware", True), (9, 10, "hardware", False), (2, 2.5, "degraded", True), (9.5, 9.75, "lost", True),
    ]  # fmt: skip


def test_overlapping_faults_of_a_node_are_one_outage(tmp_path: Path) -> None:
    """It lasts until all classes that began have ended; a class that begins twice ends once."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([
        event("a", 9, "end"), event("a", 1, "start"), event("a", 2, "start", "Fan"), event("a", 2, "start"),
        event("a", 3, "end"), event("a", 5, "end", "Fan"), event("a", 8, "start"),
    ]))  # fmt: skip
    outages = [(o.start_s / DAY_S, o.end_s / DAY_S, o.kind) for o in history.load(path, 1).nodes[0]]
    assert outages == [(1, 5, "GPU"), (8, 9, "GPU")]


def test_a_node_has_the_same_faults_in_a_larger_cluster(small: Path) -> None:
    """So that spares are compared on the same draw; another seed is another draw."""
    for source in (history.load(small, 4), rates.published("rsc1")):
        few, many = source.draw(6, 90 * DAY_S, 1), source.draw(50, 90 * DAY_S, 1)
        assert few == [fault for fault in many if fault.node < 6]
        assert source.draw(50, 90 * DAY_S, 2) != many


def test_a_draw_keeps_the_rate_of_the_trace(small: Path) -> None:
    """Whatever the shift, each of its spans has all of the outages once."""
    source = history.load(small, 4)
    for seed in range(5):
        faults = source.draw(8, 30 * DAY_S, seed)
        assert sum(fault.start_s >= 0 for fault in faults) == 2 * 3 * 4
        assert outages_per_1000_node_days(faults, 8, 30 * DAY_S) == pytest.approx(source.per_node_day * 1000)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is no JSON"),
        ("[]", "has no list of events"),
        ('[{"node_id": "a"}]', "event 1 of .* lacks"),
        (json.dumps([event("a", 1, "strt")]), "should be fault_start or fault_end"),
        (json.dumps([event("a", 1.764e9, "start")]), "should be days since the trace began"),
        ("node,start,end\nn1,2026-01-01,2026-01-02", "columns NodeName|Start|End|State"),
        (json.dumps([event("a", 1, "start"), event("b", 1, "start")]), "names 2 nodes, more than --trace-nodes 1"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """In one sentence."""
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(FaultsError, match=told):
        history.load(path, 1)


def test_levels_are_weighted_by_time() -> None:
    """Two nodes are down at once for an hour of four, and none for two."""
    faults = [SimulatedFault(0, -HOUR_S, HOUR_S, "", "lost"), SimulatedFault(1, 0, 2 * HOUR_S, "", "lost")]
    held = down_at_once([*faults, SimulatedFault(2, 0, 0, "", "process")], 4 * HOUR_S)
    assert dict(held) == {0: 2 * HOUR_S, 1: HOUR_S, 2: HOUR_S}
    assert [level_at(held, share) for share in (0.5, 0.75, 0.76)] == [0, 1, 2]


def test_repairs_that_were_not_seen_to_end_count_as_longer() -> None:
    """The median of 1, 2 and more than 3 hours is 2 hours, and the longest is unknown."""
    repairs = [(1.0, True), (2.0, True), (3.0, False)]
    assert repair_quantile(repairs, 0.5) == 2.0
    assert repair_quantile(repairs, 0.9) == float("inf")


def test_the_rates_are_met() -> None:
    """Over 400 nodes and 2,000 days, lemons included, with repairs through the two quantiles."""
    faults = rates.published("stepfun").draw(400, 2000 * DAY_S, 0)
    assert 1000 * len(faults) / (400 * 2000) == pytest.approx(4.16, rel=0.2), "less, because broken nodes do not break"
    repairs = sorted(fault.end_s - fault.start_s for fault in faults if fault.effect != "process")
    assert repairs[len(repairs) // 2] / HOUR_S == pytest.approx(35, rel=0.15)
    assert repairs[len(repairs) * 9 // 10] / HOUR_S == pytest.approx(496, rel=0.15)


def test_the_nodes_of_a_switch_fail_together(tmp_path: Path) -> None:
    """At the same second, and all are back at the same; a cluster of another size has the same ones."""
    path = tmp_path / "rates.toml"
    path.write_text(
        '[[fault]]\nkind = "gpu"\neffect = "hardware"\nper_1000_node_days = 0.001\n'
        '[[domain]]\nkind = "switch"\nnodes = 16\nper_1000_domain_days = 20.0\nrepair_p50_h = 2.0\nrepair_p90_h = 8.0\n'
    )
    source = rates.load(path)
    faults = [fault for fault in source.draw(64, 400 * DAY_S, 1) if fault.kind == "switch"]
    groups: dict[tuple[float, float], list[int]] = {}
    for fault in faults:
        groups.setdefault((fault.start_s, fault.end_s), []).append(fault.node)
    assert all(nodes == list(range(nodes[0] // 16 * 16, nodes[0] // 16 * 16 + 16)) for nodes in groups.values())
    assert len(groups) == pytest.approx(4 * 400 * 0.02, rel=0.5)
    assert source.per_node_day == pytest.approx((0.001 + 20 / 16) / 1000), "a job counts a switch once"
    assert [f for f in source.draw(32, 400 * DAY_S, 1) if f.kind == "switch"] == [f for f in faults if f.node < 32]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '[[fault]]\nkind = "x"\neffect = "lost"\nper_1000_node_days = 1.0\nspeed = 0.5',
            "only degraded nodes work on",
        ),
        (
            '[[fault]]\nkind = "x"\neffect = "lost"\nper_1000_node_days = 1.0\nrepair_p90_h = 1',
            "half of the repairs take 35 h",
        ),
        ("fault = 3", "fault: Input should be"),
        ('[[fault]]\nkind = "x"\neffect = "boom"\nper_1000_node_days = 1.0', r"fault.0.effect: Input should be 'lost'"),
        ("=", "is no TOML"),
    ],
)
def test_what_are_no_rates_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """In one sentence."""
    path = tmp_path / "rates.toml"
    path.write_text(text)
    with pytest.raises(FaultsError, match=told):
        rates.load(path)


def test_the_published_outages(published: Trace) -> None:
    """4.16 outages in 1,000 node days; down at once 7 half of the time and 32 in 99 %; repairs of 35 and 496 h."""
    span_s = published.span_s
    faults = published.draw(400, span_s, 0)
    assert outages_per_1000_node_days(faults, 400, span_s) == pytest.approx(4.16, abs=0.01)
    held = down_at_once(faults, span_s)
    assert (level_at(held, 0.5), level_at(held, 0.99)) == (7, 32)
    assert repair_quantile(published.repairs, 0.5) / HOUR_S == pytest.approx(35, abs=0.5)
    assert repair_quantile(published.repairs, 0.9) / HOUR_S == pytest.approx(496, abs=1)


def test_the_spares_that_the_published_trace_asks_for(published: Trace) -> None:
    """48 nodes: 7 on the average of the draws, 8 in 95 % of them; 1,000 nodes, copies with shifts: 60, within 6."""
    small = spares_needed(published, 48, seconds=published.span_s, draws=100)
    assert (small.mean, small.p95) == (7, 8)
    large = spares_needed(published, 1000, seconds=published.span_s, draws=8)
    assert large.mean == pytest.approx(60, abs=6)
