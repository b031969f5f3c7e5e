"""What launcher and ranks report as events, whatever a user has written into the files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.collectors.lib.run_files import parse_event, parse_run
from opsd.collectors.lib.run_watch import MAX_EVENTS
from opsd.collectors.ranks import RanksCollector
from tests.fakes.run_folder import Clock, read, reporter, values, write_run


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The shared-memory folder of the run "r1"."""
    folder = tmp_path / "shm" / "r1"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def collector(run: Path, clock: Clock) -> RanksCollector:
    return RanksCollector(run.parent, clock=clock)


def test_events_of_the_launcher_come_once_with_their_own_time(run: Path, collector: RanksCollector) -> None:
    """Also those from before the agent was started; an unfinished line waits."""
    first = json.dumps({"t": 100.5, "event": "rank_exited", "rank": 1, "culprit": True, "generation": 1})
    second = json.dumps({"t": 101.5, "event": "resumed", "step": 7})
    (run / "events.jsonl").write_text(f"{first}\n{second[:9]}")
    (event,) = read(collector).events
    assert (event.kind, event.at, event.data["run"], event.data["culprit"]) == ("rank_exited", 100.5, "r1", True)
    (run / "events.jsonl").write_text(f"{first}\n{second}\n")
    assert [(e.kind, e.at) for e in read(collector).events] == [("resumed", 101.5)]
    assert read(collector).events == ()


def test_events_that_a_launcher_passes_on_come_once(run: Path, collector: RanksCollector) -> None:
    """While it lives its stream is the only source; what it no longer passed on is read from the ranks' own files."""
    rank = reporter(run, 2)
    rank.event("checkpoint_rejected", step=40, file="shard-0", why="checksum")
    own = json.loads((run / "rank-0002.page.events.jsonl").read_text())
    passed_on = own | {"rank": 2, "generation": 1, "run": "r1"}
    (run / "events.jsonl").write_text(json.dumps(passed_on) + "\n")
    write_run(run, os.getpid())
    assert [e.kind for e in read(collector).events] == ["checkpoint_rejected"]
    rank.event("checkpoint_loaded", step=30)
    assert read(collector).events == ()
    write_run(run, os.getpid(), launcher_start=1)
    (event,) = read(collector).events
    assert (event.kind, event.data["rank"], event.data["step"]) == ("checkpoint_loaded", 2, 30)


def test_of_a_flood_the_newest_are_passed_on(run: Path, collector: RanksCollector) -> None:
    """A trainer may evaluate in each step, or the agent start beside a long file; other events are all there."""
    ended = json.dumps({"t": 1.0, "event": "rank_exited", "rank": 0})
    steps = [json.dumps({"t": 2.0, "event": "evaluation", "step": step, "results": {}}) for step in range(1000)]
    (run / "events.jsonl").write_text("\n".join([ended, *steps]) + "\n")
    first, *rest = read(collector).events
    assert first.kind == "rank_exited"
    assert [event.data["step"] for event in rest] == [*range(1000 - MAX_EVENTS, 1000)]


def test_what_small_values_take_counts(run: Path, collector: RanksCollector) -> None:
    """3 MiB of empty lists, which are kept for minutes, are 80 MiB in memory: events that hold them are left out."""
    line = json.dumps({"event": "resumed", "t": 1.0, "x": [[]] * 30_000})
    kept = 0
    with (run / "events.jsonl").open("a") as stream:
        for _ in range(30):
            print(line, file=stream, flush=True)
            kept += len(read(collector).events)
    assert 0 < kept < 6


def test_a_run_without_launcher_has_events_too(run: Path, collector: RanksCollector) -> None:
    """Another launcher may set OPSD_RANK_PAGE."""
    reporter(run, 1).event("data_worker_restarted", pid=7, why="gone", sample=5)
    (event,) = read(collector).events
    assert (event.kind, event.data["rank"], event.data["run"]) == ("data_worker_restarted", 1, "r1")


def test_an_evaluation_stays_visible(run: Path, collector: RanksCollector) -> None:
    """Its event comes once, its results are series for as long as the run is reported."""
    reporter(run, 1).event("evaluation", step=40, tokens=1000, results={"loss": 2.5}, reference={})
    for _ in range(2):
        found = {s.metric.name: s for s in read(collector).samples if s.metric.name.startswith("opsd_evaluation_")}
        assert found["opsd_evaluation_result"].labels == ("r1", "loss")
        assert (found["opsd_evaluation_result"].value, found["opsd_evaluation_step"].value) == (2.5, 40.0)


def test_the_data_mixture_is_what_the_run_told_last(run: Path, collector: RanksCollector) -> None:
    """Going back to a checkpoint takes the tokens of each source back, too."""
    rank = reporter(run)
    rank.event("data_mixture", step=20, tokens={"web": 800, "code": 200}, epochs={"web": 0.4, "code": 1.5})
    assert values(read(collector))["opsd_data_source_epochs", "r1", "code"] == 1.5
    rank.event("data_mixture", step=10, tokens={"web": 400, "code": None, 7: "x"}, epochs=[])
    samples = values(read(collector))
    assert {key: value for key, value in samples.items() if key[0].startswith("opsd_data_source_")} == {
        ("opsd_data_source_tokens", "r1", "web"): 400
    }


@given(st.binary(max_size=200))
def test_no_line_breaks_the_collector(line: bytes) -> None:
    """The files belong to users."""
    parse_event(line, "r1", 5.0)
    assert parse_run(line, "r1", lambda pid, start: pid) is None


@pytest.mark.parametrize("odd", ["1e999", "-1e999", "NaN", "1" + "0" * 400])
def test_a_number_that_is_none_is_missing(odd: str) -> None:
    """It would make runbooks fail, which look at the events of all users."""
    event = parse_event(f'{{"event": "rank_exited", "t": 1, "step": {odd}, "rank": 3}}'.encode(), "r1", 5.0)
    assert event is not None and event.data["step"] is None and event.data["rank"] == 3


def test_values_too_deep_to_be_shown_are_no_event() -> None:
    """Python would refuse to print them."""
    for depth, known in ((10, True), (900, False)):
        line = f'{{"event": "rank_exited", "t": 1, "error": {"[" * depth}{"]" * depth}}}'
        assert (parse_event(line.encode(), "r1", 5.0) is not None) is known


nasty = st.sampled_from(
    [None, True, -1, 0, 7, 10**400, 1e300, math.nan, math.inf, "", "\ud800", "running", [], {"t": 1}]
)
names = st.sampled_from(["t", "event", "run", "rank", "launcher_pid", "launcher_start", "state", "generation", "job"])


@given(st.dictionaries(names, nasty))
def test_no_json_breaks_the_collector(record: dict[str, object]) -> None:
    """Whatever the types, the run is the folder's and the time a number."""
    complete = dict.fromkeys(("world_size", "launcher_pid", "launcher_start", "generation"), 1)
    run = parse_run(
        json.dumps({"job": "", "node": "", "control": "", "folder": ""} | complete | record).encode(),
        "r1",
        lambda pid, start: pid,
    )
    assert run is None or (run.run == "r1" and run.job.encode() is not None and run.generation < 2**48)
    event = parse_event(json.dumps({"event": "resumed"} | record).encode(), "r1", 5.0)
    assert event is None or (event.data["run"] == "r1" and 0 <= event.at <= 5.0)


@pytest.mark.parametrize("name", ["xid", "gpu_lost", "", "RANK_EXITED"])
def test_a_users_file_does_not_speak_for_the_hardware(name: str) -> None:
    """A rank may report what it likes to its launcher, but not as what the node found out."""
    assert parse_event(json.dumps({"t": 1.0, "event": name}).encode(), "r1", 5.0) is None
