"""Traces from what a cluster has recorded of itself: Slurm's events of nodes, and the journals of agents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd.agent.store import Store
from opsd.simulate.faults import DAY_S, HOUR_S, FaultsError
from opsd.simulate.history import load
from tests.fakes.incidents import incident

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
