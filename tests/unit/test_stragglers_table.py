"""Tables of step times, in the forms that people have them in, and ``opsd diagnose --steps``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from opsd.commands.diagnose import diagnose
from opsd.stragglers.table import TableError, read_table, to_trace
from opsd.stragglers.trace import BACKWARD, COMPUTE, FORWARD

LONG = [
    {
        "dp_rank": rank // 2,
        "stage": rank % 2,
        "rank": rank,
        "step": step,
        "optype": kind,
        "duration": 0.5,
        "mb_id": batch,
    }
    for rank in range(4)
    for step in (7, 8, 9)
    for kind in ("forward-compute", "backward-compute", "grads-reduce-scatter")
    for batch in range(3)
]


def wide(slow: float = 1.5, steps: int = 6) -> list[dict[str, Any]]:
    """Eight ranks on two nodes, of which rank 5 is slow."""
    return [
        {
            "rank": rank,
            "step": step,
            "node": f"n{rank // 4}",
            "gpu_index": rank % 4,
            "compute": slow if rank == 5 else 1.0,
        }
        for step in range(steps)
        for rank in range(8)
    ]


def csv_of(rows: list[dict[str, Any]]) -> str:
    """The rows as CSV with a header."""
    return "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n"


def test_operations_are_added_up() -> None:
    """Operations of one kind in a step are added, their number is that of micro-batches, others are left out."""
    trace = to_trace(LONG)
    assert trace.steps == [7, 8, 9]
    assert trace.microbatches == 3
    assert trace.seconds.keys() == {FORWARD, BACKWARD}
    assert trace.seconds[FORWARD][3] == [1.5, 1.5, 1.5]
    assert (trace.places[3].dp, trace.places[3].pp) == (1, 1)


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "columns.json", "parquet"])
def test_forms_of_a_table(tmp_path: Path, kind: str) -> None:
    """CSV, JSON as rows or columns, JSON lines and Parquet say the same."""
    rows, path = wide(), tmp_path / f"steps.{kind}"
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if kind == "parquet":
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        parquet.write_table(arrow.table(columns), path)
    else:
        text = {
            "csv": csv_of(rows),
            "json": json.dumps(rows),
            "jsonl": "\n".join(map(json.dumps, rows)),
            "columns.json": json.dumps(columns),
        }
        path.write_text(text[kind], encoding="utf-8")
    trace = read_table(path)
    assert trace.seconds[COMPUTE][5] == [1.5] * 6
    assert (trace.places[5].node, trace.places[5].gpu) == ("n1", 1)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"a": 1}], "do not tell rank"),
        ([{"rank": 0, "step": "x", "compute": 1}], "is no step"),
        ([{"rank": 0, "step": 1, "compute": "quick"}], "no duration"),
        ([{"rank": 0, "step": 1, "compute": -1}], "no duration"),
        ([{"rank": 0, "step": 1, "compute": float("nan")}], "no duration"),
        ([{"rank": 0, "step": 1, "compute": 1}], "at least 2"),
        ([{"rank": "", "step": 1, "compute": 1}], "without rank or step"),
        ([], "no row"),
    ],
)
def test_what_cannot_be_judged(rows: list[dict[str, Any]], why: str) -> None:
    """One sentence says what is wrong."""
    with pytest.raises(TableError, match=why):
        to_trace(rows)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["rank", "step", "compute", "node", "phase", "seconds"]),
            st.none() | st.integers() | st.text() | st.floats(),
        )
    )
)
def test_any_rows(rows: list[dict[str, Any]]) -> None:
    """Whatever the rows are, there is a trace or a TableError."""
    sound = {"rank": 1, "step": 1, "compute": 1.0}
    try:
        trace = to_trace([sound, *({**sound, **row} for row in rows)])
    except TableError:
        return
    assert all(len(row) == len(trace.steps) for by_rank in trace.seconds.values() for row in by_rank.values())


def test_a_rank_that_came_late() -> None:
    """A rank with few of the steps is left out; a step that one rank lacks is left out, too."""
    rows = [
        row
        for row in wide(steps=20)
        if not (row["rank"] == 2 and row["step"] < 12) and (row["rank"], row["step"]) != (3, 4)
    ]
    trace = to_trace(rows)
    assert set(trace.places) == {0, 1, 3, 4, 5, 6, 7}
    assert list(trace.steps) == [step for step in range(20) if step != 4]


def test_diagnose_steps(tmp_path: Path) -> None:
    """The command names the rank, its node and the cost, in words and in JSON."""
    path = tmp_path / "steps.csv"
    path.write_text(csv_of(wide()), encoding="utf-8")
    said = CliRunner().invoke(diagnose, ["--steps", str(path)])
    assert said.exit_code == 0
    assert "rank 5 on n1, GPU 1" in said.output
    assert "1.50 times" in said.output
    found = json.loads(CliRunner().invoke(diagnose, ["--steps", str(path), "--json"]).output)
    assert (found["culprits"], found["nodes"], found["cause"]) == ([5], ["n1"], "slow worker")
    assert found["slowdown"] == pytest.approx(1.5)
    assert found["evidence"]


def test_diagnose_steps_of_a_healthy_job(tmp_path: Path) -> None:
    """Nothing stands out: that is said, and is no error."""
    path = tmp_path / "steps.csv"
    path.write_text(csv_of(wide(slow=1.0)), encoding="utf-8")
    found = json.loads(CliRunner().invoke(diagnose, ["--steps", str(path), "--json"]).output)
    assert (found["culprits"], found["slowdown"], found["others"]) == ([], 1.0, [])


@pytest.mark.parametrize("content", ["", "rank,step\n1,2\n", csv_of(wide(steps=3)), "\x00\x01,\n"])
def test_diagnose_steps_of_a_bad_table(tmp_path: Path, content: str) -> None:
    """Ends with 1 and one sentence."""
    path = tmp_path / "steps.csv"
    path.write_text(content, encoding="utf-8")
    said = CliRunner().invoke(diagnose, ["--steps", str(path)])
    assert said.exit_code == 1
    assert len(said.output.strip().splitlines()) == 1


@pytest.mark.parametrize("seconds", [0.0, 1e-320, 1.0, 1e9])
def test_diagnose_steps_that_only_the_gpu_has_timed(tmp_path: Path, seconds: float) -> None:
    """A table without the host's times is judged, also when nothing is wrong and at the limits of what is a number."""
    path = tmp_path / "steps.csv"
    rows = [{"rank": rank, "step": step, "gpu": 1.0 if rank else seconds} for step in range(6) for rank in range(8)]
    path.write_text(csv_of(rows), encoding="utf-8")
    said = CliRunner().invoke(diagnose, ["--steps", str(path)])
    assert said.exit_code == 0, said.exception
    assert ("slow GPU" in said.output) == (seconds == 1e9)


def test_durations_that_nothing_takes() -> None:
    """Sums of such numbers would overflow."""
    with pytest.raises(TableError, match="no duration"):
        to_trace([{"rank": rank, "step": step, "gpu": 1e308} for step in range(6) for rank in range(8)])


def test_steps_done_again_after_a_restart() -> None:
    """The last row of a step counts; other columns of the same phase are added to it."""
    first = [{"rank": rank, "step": 1, "compute": 5.0, "batch_time": 1.0} for rank in range(2)]
    again = [{"rank": rank, "step": 1, "compute": 2.0, "batch_time": 1.0} for rank in range(2)]
    assert to_trace([*first, *again]).seconds[COMPUTE] == {0: [3.0], 1: [3.0]}


def test_a_table_from_a_spreadsheet(tmp_path: Path) -> None:
    """A byte order mark and spaces after commas change nothing."""
    path = tmp_path / "steps.csv"
    path.write_text(csv_of(wide()).replace(",", ", "), encoding="utf-8-sig")
    assert read_table(path).seconds == to_trace(wide()).seconds


def test_a_rank_with_few_steps_is_said_to_be_left_out(tmp_path: Path) -> None:
    """One that joined late is not compared, and the answer says so."""
    path = tmp_path / "steps.csv"
    path.write_text(csv_of([row for row in wide(steps=10) if row["rank"] not in (2, 3, 6) or row["step"] > 2]))
    found = json.loads(CliRunner().invoke(diagnose, ["--steps", str(path), "--json"]).output)
    assert (found["culprits"], found["left_out"]) == ([5], [2, 3, 6])
    said = CliRunner().invoke(diagnose, ["--steps", str(path)]).output
    assert "left out: ranks 2-3, 6 with less than 80% of the steps" in said
    assert read_table(path).last(5).left_out == [2, 3, 6]
