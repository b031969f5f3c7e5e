"""The history of a node: runs, trends, yardsticks from the past, and files that cannot be used."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from opsd.preflight.base import Verdict
from opsd.preflight.history import History, HistoryError, sparkline
from opsd.preflight.judge import Past
from tests.fakes.preflight_reports import GEMM, VERSIONS, report


def burn(at: float, value: float, verdict: Verdict = Verdict.PASS):
    values = (replace(GEMM.values[0], value=value, verdict=verdict),)
    return report(replace(GEMM, values=values, started=at, verdict=verdict, findings=()), started=at)


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "state" / "preflight.sqlite")


def test_a_history_that_does_not_exist_yet_is_empty(history: History):
    """Reading makes no file."""
    assert history.runs("node-1") == []
    assert history.past("node-1", "gpu_burn") == {}
    assert history.facts("node-1", "versions") == {}
    assert not history.path.exists()


def test_runs_come_back_newest_first_and_whole(history: History):
    """Each node has its own, and the whole report is kept."""
    for at in (1.0, 3.0, 2.0):
        history.record(burn(at, at))
    history.record(replace(burn(9.0, 9.0), node="node-2"))
    assert [run.started for run in history.runs("node-1")] == [3.0, 2.0, 1.0]
    assert history.nodes() == ["node-1", "node-2"]
    assert history.report(history.runs("node-1")[0].id) == burn(3.0, 3.0)


def test_a_run_that_cannot_be_read_is_said(history: History):
    """One of an older format, or a damaged row."""
    history.record(burn(1.0, 1.0))
    with sqlite3.connect(history.path) as db:
        db.execute("UPDATE runs SET report = '{'")
    with pytest.raises(HistoryError, match="run 1 in the history"):
        history.facts("node-1", "versions")


def test_the_past_of_a_series_is_its_last_runs_oldest_first(history: History):
    """Five by default, however many there are."""
    for at in range(1, 9):
        history.record(burn(float(at), at * 10.0))
    assert history.past("node-1", "gpu_burn") == {
        ("throughput", "GPU 0"): tuple(Past(float(at), at * 10.0) for at in range(4, 9))
    }


def test_values_that_failed_are_no_yardstick(history: History):
    """A sick node must not become its own normal."""
    history.record(burn(1.0, 730.0))
    history.record(burn(2.0, 100.0, Verdict.FAIL))
    assert history.past("node-1", "gpu_burn") == {("throughput", "GPU 0"): (Past(1.0, 730.0),)}


def test_the_last_facts_come_from_the_newest_run_that_has_any(history: History):
    """A run without the versions check does not make the node forget its versions."""
    history.record(report(VERSIONS))
    history.record(burn(2000.0, 730.0))
    assert history.facts("node-1", "versions") == {"kernel": "6.8", "NCCL": "2.27"}


def test_only_the_newest_runs_of_a_node_are_kept(history: History):
    """A node that is checked before every job does not fill its disk; other nodes' runs stay."""
    history.record(replace(burn(0.0, 1.0), node="node-2"))
    for at in range(6):
        History(history.path, kept_runs=4).record(burn(float(at), 1.0))
    assert [run.started for run in history.runs("node-1")] == [5.0, 4.0, 3.0, 2.0]
    assert [len(trend.past) for trend in history.trends("node-1")] == [4]
    assert len(history.runs("node-2")) == 1


def test_trends_have_every_series_oldest_first(history: History):
    """What `opsd preflight history` draws."""
    for at in (1.0, 2.0):
        history.record(burn(at, at))
    (trend,) = history.trends("node-1")
    assert (trend.check, trend.measure, trend.subject, trend.unit) == ("gpu_burn", "throughput", "GPU 0", "flops")
    assert trend.past == (Past(1.0, 1.0), Past(2.0, 2.0))


def test_a_file_that_is_no_database_is_an_error_with_its_name(history: History):
    """Somebody else's file, or one that a full disk has cut."""
    history.path.parent.mkdir()
    history.path.write_bytes(b"not a database" * 1000)
    with pytest.raises(HistoryError, match=r"preflight\.sqlite cannot be used"):
        history.runs("node-1")
    with pytest.raises(HistoryError, match=r"preflight\.sqlite cannot be used"):
        history.record(burn(1.0, 1.0))


def test_a_curve_has_a_bar_per_value():
    """Lowest and highest bar for lowest and highest value; equal values are a line."""
    assert sparkline([1.0, 2.0, 3.0]) == "▁▅█"
    assert sparkline([5.0, 5.0]) == "▄▄"
