"""What the observations of a soak come to: each kind of failure is found, and a good hour is good."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from tests.adversary.soak.observe import Observed, series
from tests.adversary.soak.verdict import (
    Plant,
    incidents_verdict,
    memory_verdict,
    peak_verdict,
    scrape_verdict,
    slope,
    ticks_verdict,
)

PLANT = Plant(1000.0, "GPU-0", 8)


def memory(growth: float) -> list[tuple[float, float]]:
    """An hour with the noise of an allocator, large answers a third of the time, and ``growth`` in MiB an hour."""
    draw = random.Random(7)
    answers = [draw.choice((0, 0, draw.uniform(0, 40))) for _ in range(360)]
    return [(float(at), 80 + growth * at / 3600 + draw.uniform(-1, 1) + answers[at // 10]) for at in range(3600)]


@pytest.mark.parametrize(("growth", "flat"), [(0.0, True), (1.0, True), (5.0, False), (60.0, False)])
def test_memory_that_grows_is_found(growth: float, flat: bool) -> None:
    """The interval has the true slope in it, and an hour is enough to tell."""
    found = slope(memory(growth))
    assert found.low <= growth <= found.high and found.high - found.low < 2.0
    assert (memory_verdict(found, 3600) == "") is flat
    assert memory_verdict(found, 60) == ""


def test_memory_near_the_limit_is_found() -> None:
    """However short it was."""
    assert peak_verdict(199.0) == ""
    assert peak_verdict(256.0) == "memory was at 256 MiB"


def incident(**changes: Any) -> Mapping[str, Any]:
    known = {"id": "i", "kind": "gpu_xid", "data": {"uuid": "GPU-0"}, "opened_at": 1001.0, "state": "resolved"}
    return known | changes


def said(state: str, id: str = "i") -> Mapping[str, Any]:
    return {"id": id, "text": f"[warning] node1: gpu_xid {state}: GPU 0: Xid 8"}


TOLD = [said("opened"), {"text": "GPU 0: restart", "target": "node1"}, said("resolved")]


def test_a_fault_that_was_journalled_and_told_once_is_good() -> None:
    """Notices without an incident, and other incidents, count for nothing."""
    assert incidents_verdict([PLANT], [incident(), incident(id="x", kind="loss_nan")], TOLD) == []


@pytest.mark.parametrize(
    ("journal", "told", "expected"),
    [
        ([], TOLD, "0 incidents in the journal"),
        ([incident(), incident(id="j")], TOLD, "2 incidents in the journal"),
        ([incident(opened_at=1100.0)], TOLD, "0 incidents in the journal"),
        ([incident(state="verifying")], TOLD, "verifying in the journal"),
        ([incident()], TOLD[1:], "told 0 times that it was opened"),
        ([incident()], [*TOLD, said("resolved")], "told 2 times that it was resolved"),
        ([incident()], [*TOLD, said("opened", "other"), said("opened", "other")], "1 incidents were opened more"),
    ],
)
def test_what_is_lost_or_told_twice_is_found(journal: list[Any], told: list[Any], expected: str) -> None:
    """In a sentence that names the fault."""
    assert any(expected in sentence for sentence in incidents_verdict([PLANT], journal, told))


def test_scrapes_that_are_late_or_missing_are_found() -> None:
    """And data that is old."""
    assert scrape_verdict(Observed(scrapes=[0.01, 0.9], stale_s=5.0)) == []
    assert len(scrape_verdict(Observed(scrapes=[1.5], unanswered=[7.0], stale_s=60.0))) == 3


def test_what_the_agent_says_of_itself_is_heard() -> None:
    """Ticks, records, runbooks and collectors."""
    good = 'opsd_agent_missed_ticks_total 0.0\nopsd_collector_state{collector="nvml",state="hung"} 0.0\n'
    assert ticks_verdict(series(good)) == []
    bad = good.replace(" 0.0", " 1.0") + 'opsd_runbook_errors_total{kind="x"} 2.0\nopsd_journal_lost_records_total 3\n'
    assert len(ticks_verdict(series(bad))) == 4
