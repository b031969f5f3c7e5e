"""The ledger: every second of a run in exactly one bucket, and the right one; its curves."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from opsd import exitcodes
from opsd.commands.ledger import ledger as ledger_command
from opsd.ledger.for_user import NAMES, curves, records_for_user
from opsd.ledger.ledger import BUCKETS, Ledger, LedgerError, make_ledger, read_ledger

# The ledger: every second of a run in exactly one bucket, and the right one.


Line = dict[str, Any]


def event(t: float, kind: str, generation: int = 1, **fields: Any) -> Line:
    """A launcher event."""
    return {"t": t, "event": kind, "generation": generation, "run": "r", "node": "n", **fields}


def step(t: float, number: int, generation: int = 1, step_s: float = 1.0, **fields: float) -> Line:
    """A line of metrics.jsonl."""
    return {"t": t, "step": number, "generation": generation, "step_s": step_s, "data_s": 0.01, **fields}


def seconds(ledger: Ledger) -> dict[str, float]:
    """The buckets that hold any time."""
    return {name: round(value, 6) for name, value in ledger.buckets.items() if value}


def test_undisturbed_run() -> None:
    """Setup until the first step begins, then productive, then the stop."""
    ledger = make_ledger(
        [event(100, "generation_started"), event(109, "finished")],
        [step(105 + i, i, checkpoint_s=0.25) for i in range(3)],
    )
    assert seconds(ledger) == {"setup": 4.0, "productive": 2.25, "checkpoint_stall": 0.75, "stop": 2.0}
    assert ledger.wall_s == 9.0
    assert ledger.ettr == 0.25
    assert ledger.notes == ()


def test_crash() -> None:
    """Detection, restart, load and recomputed steps each get their own time."""
    events = [
        event(0, "generation_started"),
        event(5.5, "rank_exited", culprit=True, noticed_s=0.125),
        event(6, "generation_started", 2),
        event(7.5, "checkpoint_loaded", 2, load_s=0.5),
        event(10, "finished", 2),
    ]
    metrics = [step(i, i) for i in range(2, 6)] + [step(9, 5, 2), step(10, 6, 2)]
    assert seconds(make_ledger(events, metrics)) == {
        "setup": 1.0,
        "productive": 5.0,
        "recomputed": 1.375,  # step 5 again, and what the crash cut off
        "detection": 0.125,
        "restart": 2.0,
        "load": 0.5,
    }


def test_hang() -> None:
    """All the time in which nothing moved is detection."""
    events = [
        event(0, "generation_started"),
        event(9, "hang_detected", stuck_s=4.75),
        event(9.5, "generation_started", 2),
        event(12, "finished", 2),
    ]
    ledger = make_ledger(events, [step(i, i) for i in range(2, 5)] + [step(12, 5, 2)])
    assert seconds(ledger) == {"setup": 1.0, "productive": 4.0, "recomputed": 0.25, "detection": 4.75, "restart": 2.0}


def test_lost_node() -> None:
    """The silence of a node is detection, and what follows restart; a spare that is lost disturbs nobody."""
    events = [
        event(0, "generation_started"),
        event(2.5, "node_lost", lost="n3", ranks=False, silent_s=2.0),
        event(6.5, "node_lost", lost="n2", ranks=True, silent_s=2.25),
        event(6.75, "rank_exited", culprit=False, noticed_s=0.0),
        event(7, "generation_started", 2),
        event(10, "finished", 2),
    ]
    ledger = make_ledger(events, [step(i, i) for i in range(2, 5)] + [step(9, 5, 2), step(10, 6, 2)])
    assert seconds(ledger) == {"setup": 1.0, "productive": 5.0, "recomputed": 0.25, "detection": 2.25, "restart": 1.5}


def test_outage_of_all_nodes() -> None:
    """From the end of the ranks on, as it was told once the nodes had met again, the run waits for its restart."""
    events = [
        event(0, "generation_started"),
        event(4.5, "ranks_gone", gone="n1", gone_s=30.0),
        event(35, "generation_started", 2),
        event(38, "finished", 2),
    ]
    ledger = make_ledger(events, [step(i, i) for i in range(2, 5)] + [step(37, 5, 2), step(38, 6, 2)])
    assert seconds(ledger) == {"setup": 1.0, "productive": 5.0, "recomputed": 0.5, "restart": 31.5}


def test_data_stall_is_what_exceeds_the_usual() -> None:
    """A step that waited much longer than the median has the rest of its wait booked as a stall."""
    metrics = [step(i, i, data_s=0.1) for i in range(1, 10)] + [step(13, 10, step_s=4.0, data_s=3.1)]
    ledger = make_ledger([event(0, "generation_started"), event(13, "finished")], metrics)
    assert seconds(ledger) == {"productive": 10.0, "data_stall": 3.0}


def test_requeued_run() -> None:
    """The time in the queue between two launchers is not the run's fault and not restart."""
    events = [
        event(0, "generation_started"),
        event(3, "stopped"),
        event(3, "finished"),
        event(1003, "generation_started", 2),
        event(1006, "finished", 2),
    ]
    ledger = make_ledger(events, [step(2, 1), step(1006, 2, 2)])
    assert seconds(ledger) == {"setup": 3.0, "productive": 2.0, "stop": 1.0, "queued": 1000.0}


def test_lines_with_several_steps() -> None:
    """What a launcher has seen of any program: done again is the part before the crash, evaluation is no step."""
    events = [
        event(0, "generation_started"),
        event(12, "rank_exited", culprit=True, noticed_s=0.0),
        event(13, "generation_started", 2),
        event(24, "finished", 2),
    ]
    metrics = [
        step(12, 9, step_s=10.0, steps=10, data_s=0.1, evaluation_s=2.0),
        step(24, 14, 2, step_s=10.0, steps=10, data_s=0.1),
    ]
    ledger = make_ledger(events, metrics)
    expected = {"setup": 2.0, "other": 2.0, "productive": 13.0, "recomputed": 5.0, "restart": 2.0}
    assert seconds(ledger) == expected
    assert ledger.steps == 20


@pytest.mark.parametrize("names", [("metrics.jsonl",), ("steps.jsonl",), ("metrics.jsonl", "steps.jsonl")])
def test_steps_of_the_trainer_come_before_those_of_the_launcher(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Either will do, and no step is counted twice."""
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in [event(0, "generation_started")]))
    for name in names:
        (tmp_path / name).write_text("".join(json.dumps(step(t, t)) + "\n" for t in range(2, 5)))
    assert read_ledger(tmp_path).steps == 3


def test_lines_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    """Steps that are missing for that reason would otherwise look like steps that were never done."""
    (tmp_path / "events.jsonl").write_text(json.dumps(event(0, "generation_started")) + "\n")
    lines = [json.dumps(step(2, 2)), "\0\0\0", json.dumps(step(4, 4)), '{"t": 5, "st', json.dumps(step(6, 6)), '{"t']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    ledger = read_ledger(tmp_path)
    assert (ledger.steps, ledger.notes[0]) == (3, "2 lines of metrics.jsonl cannot be read (the first is line 2)")


def test_a_metrics_file_of_the_program_is_none_of_the_trainer(tmp_path: Path) -> None:
    """Its lines say nothing of time; those of the launcher count."""
    (tmp_path / "events.jsonl").write_text(json.dumps(event(0, "generation_started")) + "\n")
    own = [{"t": t, "step": t, "generation": 1, "loss": 2.0} for t in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(step(t, t)) + "\n" for t in range(2, 5)))
    ledger = read_ledger(tmp_path)
    assert (ledger.steps, ledger.ettr) == (3, pytest.approx(0.75))


def test_without_metrics() -> None:
    """From events alone the ledger still sums, and says what it cannot tell."""
    events = [
        event(0, "generation_started"),
        event(50, "rank_exited", culprit=True, noticed_s=0.0),
        event(51, "generation_started", 2),
        event(54, "resumed", 2, step=3),
        event(100, "finished", 2),
    ]
    ledger = make_ledger(events, [])
    assert seconds(ledger) == {"productive": 96.0, "restart": 4.0}
    assert "no metrics.jsonl" in ledger.notes[0]


def test_run_that_never_began() -> None:
    """Without a generation there is no ledger."""
    with pytest.raises(LedgerError, match="never began"):
        make_ledger([event(0, "finished")], [])


TIMES = st.floats(0, 1000, allow_nan=False)

EVENTS = st.builds(
    event,
    TIMES,
    st.sampled_from(
        [
            "generation_started",
            "rank_exited",
            "hang_detected",
            "node_lost",
            "finished",
            "checkpoint_loaded",
            "resumed",
            "stopped",
        ]
    ),
    st.integers(1, 4),
    culprit=st.booleans(),
    noticed_s=st.floats(0, 10),
    stuck_s=st.floats(0, 100),
    silent_s=st.floats(0, 10),
    ranks=st.booleans(),
    load_s=st.floats(0, 100),
)

STEPS = st.builds(
    step,
    TIMES,
    st.integers(0, 20),
    st.integers(1, 4),
    step_s=st.floats(0, 50),
    data_s=st.floats(0, 50),
    checkpoint_s=st.floats(0, 50),
)


@given(st.lists(EVENTS, max_size=12), st.lists(STEPS, max_size=20))
def test_buckets_sum_to_the_wall_clock(events: list[Line], metrics: list[Line]) -> None:
    """Whatever the records say, in whatever order: no bucket is negative and together they are the wall clock."""
    events = [event(500, "generation_started"), *events]
    ledger = make_ledger(events, metrics)
    assert set(ledger.nanoseconds) == set(BUCKETS)
    assert all(value >= 0 for value in ledger.nanoseconds.values())
    began = min(e["t"] for e in events if e["event"] == "generation_started")
    ended = max([e["t"] for e in events] + [began])
    assert sum(ledger.nanoseconds.values()) >= round(ended * 1e9) - round(began * 1e9)
    latest = max([ended] + [line["t"] for line in metrics])
    assert sum(ledger.nanoseconds.values()) <= round(latest * 1e9) - round(began * 1e9)
    assert 0.0 <= ledger.ettr <= 1.0


def test_command_reads_a_run_folder(tmp_path: Path) -> None:
    """The command prints table and JSON; half a line at the end of a file is no obstacle."""
    lines = [event(0, "generation_started"), event(3, "finished")]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"t": 9, "eve')
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step(3, 1)) + "\n{")
    assert seconds(read_ledger(tmp_path)) == {"setup": 2.0, "productive": 1.0}
    table = CliRunner().invoke(ledger_command, [str(tmp_path)])
    assert "ETTR 33.3%" in table.output
    result = CliRunner().invoke(ledger_command, [str(tmp_path), "--json"])
    assert json.loads(result.output)["buckets"]["setup"] == 2.0


def test_command_without_a_run(tmp_path: Path) -> None:
    """A folder without events is refused in one sentence."""
    result = CliRunner().invoke(ledger_command, [str(tmp_path)], standalone_mode=False)
    assert result.return_value == exitcodes.USAGE
    assert result.output.count("\n") == 1
    assert "not a run folder" in result.output


def test_nobody_is_waited_for(tmp_path: Path) -> None:
    """A pipe in the place of the events, into which nobody writes, held up a report for good."""
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(LedgerError, match=r"events.jsonl: not a regular file"):
        read_ledger(tmp_path)


def test_a_line_without_end_fills_no_memory(tmp_path: Path) -> None:
    """A file of zeros, as some file systems leave after a crash, is no line; what comes before and after it counts."""
    lines = [event(0, "generation_started"), event(3, "finished")]
    file = tmp_path / "events.jsonl"
    file.write_text(json.dumps(lines[0]) + "\n")
    os.truncate(file, 1 << 27)
    with file.open("a") as end:
        end.write("\n" + json.dumps(lines[1]) + "\n")
    tracemalloc.start()
    try:
        assert read_ledger(tmp_path).wall_s == 3.0
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read the files of others")
def test_root_follows_no_link_of_another_user(tmp_path: Path) -> None:
    """The report would tell in the user's folder what only root may read."""
    secret, theirs = tmp_path / "secret.jsonl", tmp_path / "run"
    secret.write_text(json.dumps(event(0, "generation_started")) + "\n")
    theirs.mkdir()
    (theirs / "events.jsonl").symlink_to(secret)
    assert read_ledger(theirs).wall_s == 0.0
    os.chown(theirs, 65_534, 65_534)
    with pytest.raises(LedgerError, match=r"events.jsonl: a link of another user, which root does not follow"):
        read_ledger(theirs)


# The course of a run: thinned curves from the lines about its steps.


ANYTHING = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3) | st.lists(st.none())


def line(t: float, **values: Any) -> dict[str, Any]:
    return {"t": t, "step": 1, "generation": 1, **values}


def test_a_long_run_is_a_few_hundred_points() -> None:
    """The mean of the steps around each; first and last remain near the ends."""
    found = curves([line(t, loss=10.0 - t / 1000, step_s=0.5) for t in range(10_000)], points=100)
    assert len(found["loss"]) == 100 and "tokens_per_s" not in found
    assert {value for _, value in found["step_s"]} == {0.5}
    assert found["loss"][0][0] < 100 and found["loss"][-1][0] > 9_900
    assert all(math.isclose(value, 10.0 - at / 1000) for at, value in found["loss"])


def test_a_line_of_several_steps_counts_by_the_step() -> None:
    """steps.jsonl has the steps of ten seconds in one line."""
    assert curves([line(1, step_s=10.0, steps=20), line(2, step_s=6.0, steps=10)])["step_s"] == [(1.0, 0.5), (2.0, 0.6)]


def test_what_diverged_is_a_gap_and_no_number() -> None:
    """The trainer writes null for a loss that is not finite."""
    found = curves([line(1, loss=2.0), line(2, loss=None), line(3, loss=math.inf), line(4, loss=3.0)])
    assert found == {"loss": [(1.0, 2.0), (4.0, 3.0)]}


@given(st.lists(st.dictionaries(st.sampled_from(["t", "steps", *NAMES]), ANYTHING), max_size=30), st.integers(1, 9))
def test_any_lines_become_finite_points(lines: list[dict[str, Any]], points: int) -> None:
    """The file is a user's: no value in it breaks the page. At most as many points as asked for, in order."""
    for curve in curves(lines, points).values():
        assert len(curve) <= points or points < 2
        assert all(math.isfinite(at) and math.isfinite(value) for at, value in curve)
        assert curve == sorted(curve, key=lambda point: point[0])


def test_they_come_with_the_ledger_of_the_run(tmp_path: Path) -> None:
    """Read once, with the rights of the run's user."""
    events = [{"t": 1.0, "event": "generation_started", "generation": 1}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line(2.0 + t, loss=1.0, step_s=1.0)) + "\n" for t in range(3))
    )
    told = records_for_user(tmp_path, os.getuid())
    assert told["steps"] == 3 and told["curves"]["loss"] == [(2.0, 1.0), (3.0, 1.0), (4.0, 1.0)]
