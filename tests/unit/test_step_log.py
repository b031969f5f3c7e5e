"""Steps on rank pages, written down for the ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from opsd.client import RING_STEPS
from opsd.launch.io.reporting import flush_all
from opsd.launch.ranks.step_log import StepLog
from tests.fakes.ranks import FakeRank


def lines(folder: Path) -> list[dict[str, Any]]:
    assert not flush_all(10)
    path = folder / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note(log: StepLog, ranks: Mapping[int, FakeRank], generation: int = 1) -> None:
    log.note(generation, {rank: fake.page for rank, fake in ranks.items()})


def test_a_line_has_the_steps_of_ten_seconds(tmp_path: Path) -> None:
    """Steps that take longer have a line each; phases are summed, and the setup is no part of a step."""
    log, rank = StepLog(tmp_path), FakeRank(0)
    rank.step(5.0, 5.0, setup=4.0, data=0.5)
    for second in range(6, 40):
        rank.step(float(second), 1.0, data=0.25, evaluation=0.5)
        note(log, {0: rank})
    log.flush()
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [5, 15, 25, 34]
    assert [line["steps"] for line in written] == [6, 10, 10, 9]
    assert (written[0]["step_s"], written[0]["data_s"], written[0]["evaluation_s"]) == (6.0, 1.75, 2.5)


@given(st.lists(st.integers(0, 3 * RING_STEPS), min_size=1, max_size=8))
def test_no_step_is_lost_between_two_looks(tmp_path_factory: Any, counts: list[int]) -> None:
    """Steps that the page has forgotten by the next look count like those that are left."""
    folder = tmp_path_factory.mktemp("steps")
    log, rank, now = StepLog(folder), FakeRank(0), 0.0
    for count in counts:
        for _ in range(count):
            now += 0.5
            rank.step(now, 0.5)
        log.note(1, {0: replace(rank.page, steps_reported=len(rank.records))})
    log.flush()
    written = lines(folder)
    assert sum(line["steps"] for line in written) == sum(counts)
    assert abs(sum(line["step_s"] for line in written) - 0.5 * sum(counts)) < 0.001 * max(1, len(written))


def test_one_rank_of_the_run_is_enough(tmp_path: Path) -> None:
    """The first that steps, on the node of rank 0: others write nothing."""
    here, there = StepLog(tmp_path / "here"), StepLog(tmp_path / "there")
    for log in (here, there):
        (tmp_path / ("here" if log is here else "there")).mkdir()
    ranks = {number: FakeRank(number) for number in range(4)}
    for number in (1, 2, 3):
        ranks[number].step(1.0, 1.0)
    note(here, {0: ranks[0], 1: ranks[1]})
    note(there, {2: ranks[2], 3: ranks[3]})
    here.flush()
    there.flush()
    assert [line["steps"] for line in lines(tmp_path / "here")] == [1]
    assert lines(tmp_path / "there") == []


def test_each_generation_has_its_own_lines(tmp_path: Path) -> None:
    """The steps before a restart are written when the next generation begins."""
    log, rank = StepLog(tmp_path), FakeRank(0)
    rank.step(1.0, 1.0)
    note(log, {0: rank})
    again = FakeRank(0, born=9.0)
    again.step(10.0, 1.0)
    note(log, {0: again}, generation=2)
    log.flush()
    assert [(line["generation"], line["steps"]) for line in lines(tmp_path)] == [(1, 1), (2, 1)]


def test_losses_and_tokens_that_a_program_reports_are_kept(tmp_path: Path) -> None:
    """Tokens of all ranks, those of other nodes like those here, and no count twice after a restart of the ranks."""
    log, ranks = StepLog(tmp_path), {rank: FakeRank(rank) for rank in range(2)}
    for second in range(1, 4):
        for rank in ranks.values():
            rank.step(float(second), 1.0)
            rank.records[-1] = replace(rank.records[-1], loss=5.0 - second if second < 3 else float("nan"))
        log.note(1, {number: replace(rank.page, tokens=100 * second) for number, rank in ranks.items()})
    again = FakeRank(0, born=9.0)
    again.step(10.0, 1.0)
    log.note(2, {0: replace(again.page, tokens=50)})
    log.flush()
    first, second_line = lines(tmp_path)
    assert (first["loss"], first["new_tokens"], first["tokens_per_s"]) == (3.0, 2400, 800.0)
    assert second_line["new_tokens"] == 400
    silent = StepLog(tmp_path / "silent")
    (tmp_path / "silent").mkdir()
    silent.note(1, {0: replace(again.page, steps=(replace(again.records[0], loss=float("nan")),))})
    silent.flush()
    assert not {"loss", "new_tokens", "tokens_per_s"} & lines(tmp_path / "silent")[0].keys()
