"""Faults for the simulator: traces, rates, records of a cluster, and the command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from opsd import exitcodes
from opsd.agent.store import Store
from opsd.commands.main import cli
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
from opsd.simulate.history import load
from opsd.simulate.trace import Trace
from tests.fakes.incidents import incident

# Faults for the simulator: traces, rates, and what can be said of them without a run.


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


# ``opsd simulate`` on the command line.


RUN = ("simulate", "--nodes", "12", "--spares", "3", "--days", "20", "--draws", "3")


def simulated(*more: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*RUN, *more, "--json", "-"], catch_exceptions=False)
    assert result.exit_code == exitcodes.OK, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_the_result_as_json() -> None:
    """The buckets sum to the wall clock, and the interval holds the mean."""
    answer = simulated("--advise")
    wanted = {
        "ettr", "ettr_low", "ettr_high", "wall_s", "buckets", "outages_per_1000_node_days", "spares_in_use_p50",
        "spares_in_use_p99", "swaps", "requeues", "elapsed_s", "spares_needed",
    }  # fmt: skip
    assert wanted <= answer.keys()
    assert sum(answer["buckets"].values()) == pytest.approx(answer["wall_s"])
    assert answer["wall_s"] == 20 * 86_400
    assert answer["ettr_low"] <= answer["ettr"] <= answer["ettr_high"]


def test_ten_thousand_nodes_fit_into_two_gib() -> None:
    """Of address space, which is more than what is used of it."""
    command = [sys.executable, "-m", "opsd", "simulate", "--nodes", "9400", "--spares", "600", "--days", "1"]
    limited = ["sh", "-c", f'ulimit -v {2 << 20}; exec "$@"', "sh", *command, "--draws", "1", "--json", "-"]
    done = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == exitcodes.OK, done.stderr
    assert json.loads(done.stdout)["wall_s"] == 86_400


def test_policies_and_spares_beside_each_other(tmp_path: Path) -> None:
    """With the same outages each; a sweep is drawn as well."""
    policies = simulated("--compare")["policies"]
    assert [each["policy"] for each in policies] == ["torchrun", "requeue", "hot", "pool", "shrink"]
    assert len({each["outages_per_1000_node_days"] for each in policies}) == 1
    assert (policies[0]["gain"], policies[3]["gain_low"] <= policies[3]["gain"]) == (0, True)
    assert policies[3]["gain"] == pytest.approx(policies[3]["ettr"] - policies[0]["ettr"])
    bars = tmp_path / "policies.svg"
    simulated("--compare", "--chart", str(bars))
    assert bars.read_text().count("<rect") == 6 * (5 + 1)
    chart = tmp_path / "spares.svg"
    answer = simulated("--sweep", "spares=0..3", "--chart", str(chart))
    assert [each["spares"] for each in answer["sweep"]] == [0, 1, 2, 3]
    assert answer["knee"] in range(4)
    assert chart.read_text().startswith("<svg")


@pytest.mark.parametrize("more", [(), ("--compare",), ("--sweep", "spares=0..2")])
def test_the_result_for_people(more: tuple[str, ...]) -> None:
    """Says where its times are from."""
    result = CliRunner().invoke(cli, [*RUN, *more], catch_exceptions=False)
    assert "ETTR" in result.stdout
    assert "docs/benchmarks.md" in result.stdout


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--compare", "--sweep", "spares=0..1"), "exclude each other"),
        (("--sweep", "spares=4..1"), "should be spares=FIRST..LAST"),
        (("--chart", "x.svg"), "--chart needs --sweep or --compare"),
        (("--rates", "/nowhere.toml"), "the built-in rates are stepfun"),
        (("--trace", "/nowhere.json"), "cannot be read"),
        (("--trace-nodes", "4"), "--trace-nodes needs --trace"),
        (("--trace", "/dev/zero"), "is a device"),
        (("--trace", "/dev/null", "--rates", "rsc1"), "exclude each other"),
        (("--rates", "/dev/zero"), "not a regular file"),
        (("--interval-s", "1e308"), "not in the range"),
        (("--least", "13"), "more than --nodes 12"),
        (("--inside", "4"), "more than --spares 3"),
        (("--topology", "/dev/zero"), "/dev/zero cannot be read: not a regular file"),
        (("--topology", "/dev/null"), "has no nodes below a switch"),
        (("--topology", "/dev/null", "--per-switch", "4"), "exclude each other"),
    ],
)
def test_bad_input_is_one_sentence(more: tuple[str, ...], told: str) -> None:
    """And nothing is played."""
    result = CliRunner().invoke(cli, [*RUN, *more])
    assert (result.exit_code, told in result.output) == (exitcodes.USAGE, True), result.output


# Traces from what a cluster has recorded of itself: Slurm's events of nodes, and the journals of agents.


HEAD = "ClusterNodes|NodeName|TimeStart|TimeEnd|State|Reason|User"

EVENTS = f"""{HEAD}
n[1-10]||2026-01-01T00:00:00|Unknown||Cluster Registered TRES|
|n1|2026-01-02T00:00:00|2026-01-02T06:00:00|DRAIN|opsd:i-1 gpu_ecc: 4 errors; see opsd incidents show i-1|root(0)
|n1|2026-01-02T05:00:00|2026-01-02T08:00:00|DOWN*|Not responding|slurm(64030)
|n2|2026-01-09T00:00:00|Unknown|DOWN*|Not responding|slurm(64030)
"""


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_events_of_slurm_are_outages(tmp_path: Path) -> None:
    """Those that overlap are one, of the first's kind; one that lasts has not ended; the cluster's own are none."""
    path = tmp_path / "events.txt"
    path.write_text(EVENTS)
    trace = load(path, None)
    assert (len(trace.nodes), trace.span_s / DAY_S) == (10, 7)
    outages = [outage for node in trace.nodes for outage in node]
    assert [(o.start_s / HOUR_S, o.end_s / HOUR_S, o.kind, o.effect, o.ended) for o in outages] == [
        (0, 8, "gpu_ecc", "degraded", True), (168, 168, "down", "lost", False),
    ]  # fmt: skip


def test_an_outage_may_end_in_the_hour_that_autumn_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From ten to three in the first to ten past two in the second: 20 minutes."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    path = tmp_path / "events.txt"
    path.write_text("NodeName|Start|End|State\nn1|2026-10-25T02:50:00|2026-10-25T02:10:00|DOWN\n")
    (outage,) = load(path, 1).nodes[0]
    assert outage.end_s - outage.start_s == 20 * 60


def test_journals_of_agents_are_outages(tmp_path: Path) -> None:
    """From the drain of the node to the end of the incident behind it."""
    at = 1_790_000_000.0
    for node in ("n1", "n2"):
        over = incident(f"{node}-1", opened_at=at, resolved_at=at + 30 * HOUR_S)
        with Store(tmp_path / node / "journal.db", at) as store:
            rows = [
                ("INSERT INTO actions (incident, kind, verb, target, at) VALUES (?, 'gpu_ecc', ?, ?, ?)",
                 (f"{node}-1", verb, node, at + HOUR_S))
                for verb in ("notify", "drain_node") if node == "n1" or verb == "notify"
            ]  # fmt: skip
            store.write([over], rows)
    trace = load(tmp_path, None)
    assert [[(o.start_s / HOUR_S, o.end_s / HOUR_S, o.kind) for o in node] for node in trace.nodes] == [
        [(1, 30, "gpu_ecc")], [],
    ]  # fmt: skip
    assert trace.span_s == 2 * DAY_S


@pytest.mark.parametrize(
    ("text", "nodes", "told"),
    [
        (f"{HEAD}\n", None, "names no node"),
        (EVENTS.replace("n[1-10]", ""), None, "names only nodes that have failed"),
        (EVENTS, 1, "more than --trace-nodes 1"),
        (f"{HEAD}\n|n1|yesterday|Unknown|DOWN|x|y\n", None, "'yesterday' is no time"),
        (f"{HEAD}\n|n1|2026-01-02T00:00:00|2026-01-01T00:00:00|DOWN|x|y\n", None, "ends before it"),
        ("SQLite format 3\x00 and nothing else", None, "is no journal"),
    ],
)
def test_what_is_no_history_is_refused(tmp_path: Path, text: str, nodes: int | None, told: str) -> None:
    """In one sentence."""
    path = tmp_path / "history"
    path.write_text(text)
    with pytest.raises(FaultsError, match=told):
        load(path, nodes)
