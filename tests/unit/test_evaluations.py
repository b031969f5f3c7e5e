"""Evaluations: handed on, as other programs write them, and as series."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opsd.checkpoints.manifest import Manifest, commit, folder_of
from opsd.client import Reporter, events_path
from opsd.collectors.base import Event
from opsd.collectors.lib.rank_series import MAX_NAMES, evaluations
from opsd.evaluations.harness import HarnessError, read_results
from opsd.evaluations.queue import AWAITING, RESULTS, SUBMITTED, Queue, without_rank_variables
from opsd.launch.ranks.settings import Assignment, Program, Settings
from opsd.trainer.config import load
from opsd.trainer.evaluations import queue_of

# Evaluations as series: the newest that has results, whatever a user has written into it.


def evaluation(**data: Any) -> Event:
    return Event("evaluation", 0.0, "an evaluation", {"step": 200, "tokens": 1_000_000, **data})


def series(*events: Event) -> dict[tuple[str, ...], float]:
    newest = evaluations("r")
    for event in events:
        newest.note(event)
    return {(sample.metric.name, *sample.labels): sample.value for sample in newest.samples()}


def test_the_newest_evaluation_is_exported_beside_the_reference() -> None:
    """Results by their names; other events change nothing."""
    old = evaluation(step=100, results={"loss": 3.0, "arc": 0.2})
    new = evaluation(results={"loss": 2.5}, reference={"loss": 2.4})
    assert series(old, new, Event("resumed", 0.0, "")) == {
        ("opsd_evaluation_step", "r"): 200.0,
        ("opsd_evaluation_tokens", "r"): 1_000_000.0,
        ("opsd_evaluation_result", "r", "loss"): 2.5,
        ("opsd_evaluation_reference", "r", "loss"): 2.4,
    }


def test_an_evaluation_that_failed_does_not_take_the_last_one_away() -> None:
    """What is known of the run is still known."""
    good = evaluation(results={"loss": 2.5})
    assert series(good, evaluation(step=300, tokens=None, results={}, why="no data")) == series(good)
    assert series() == {}


def test_the_number_of_series_is_bounded() -> None:
    """A user cannot flood Prometheus with names."""
    many = evaluation(results={f"task-{number}": 0.5 for number in range(10_000)} | {"x" * 1000: 1.0})
    assert len(series(many)) == 2 + MAX_NAMES


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["step", "tokens", "results", "reference"]), json_values))
def test_nothing_that_a_user_writes_breaks_it(data: dict[str, Any]) -> None:
    """Any JSON in any place; what is no number is no sample."""
    assert all(isinstance(value, float) for value in series(evaluation(**data)).values())


# How the trainer hands its evaluations on: to a process that is no rank, and none gets lost between two starts.


def test_an_evaluation_is_no_rank() -> None:
    """Nothing of what the launcher gives to its ranks alone is left but its mark, by which it finds what they began."""
    base = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "OPSD_CONFIG": "/etc/opsd.toml", "HOME": "/home/a"}
    kept = dict.fromkeys(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "OMP_NUM_THREADS"), "1")
    kept["TORCH_FR_BUFFER_SIZE"] = "2000"
    settings = Settings(Program("module", "train", (), "python", Path("/r")), "r", "1", "n1", 2, "r", evaluation="{}")
    fixed = settings.environment(0, Path("/r"), base)
    changing = settings.generation_environment(
        Assignment(0, 2, 0, 2, 4, "n1", 29500), 0, generation=3, restarts=2, error_file=Path("/e"), page=Path("/p")
    )
    assert without_rank_variables({**fixed, **changing}) == base | kept | {"OPSD_LAUNCHER": fixed["OPSD_LAUNCHER"]}


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """That of a checkpoint of step 20 which waits for its evaluation."""
    folder = folder_of(tmp_path / "checkpoints", 20)
    folder.mkdir(parents=True)
    commit(folder, Manifest(20, 80, {"dp": 1}, "", (), "local", 0.0))
    (folder / AWAITING).touch()
    return folder / AWAITING


def begin(folder: Path, queue: str = "{command}") -> Queue:
    """Another start of the run."""
    config = load("tiny", ["data.shards=/data", f"evaluation.queue={json.dumps(queue)}"], {})
    return queue_of(config, folder, Reporter(folder / "page"))


def events(folder: Path) -> list[dict[str, Any]]:
    path = events_path(folder / "page")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("refuses", "how"), [("false", "false ended with status 1"), ("/none", "/none: No such file or directory")]
)
def test_what_a_queue_refused_is_told_and_handed_in_by_the_next_start(
    tmp_path: Path, mark: Path, refuses: str, how: str
) -> None:
    """Once it has been taken, a later start does not hand it in again."""
    begin(tmp_path, refuses).close()
    (event,) = events(tmp_path)
    assert (event["step"], event["results"]) == (20, {})
    assert event["why"].startswith(how)
    hand_in = f"sh -c 'echo taken >> {tmp_path}/queue'"
    for _ in range(2):
        begin(tmp_path, hand_in).close()
    assert (tmp_path / "queue").read_text() == "taken\n"
    assert mark.read_text() == SUBMITTED
    assert len(events(tmp_path)) == 1


def test_an_evaluation_that_was_done_has_no_mark(tmp_path: Path, mark: Path) -> None:
    """What the evaluation has taken away does not come back, or the checkpoint would stay for ever."""
    begin(tmp_path, f"rm {mark}").close()
    assert not mark.exists()


def test_results_that_came_between_two_starts_are_told(tmp_path: Path) -> None:
    """Each once; lines that two writers have mixed up are passed over."""
    begin(tmp_path).close()
    good = '{"t": 1.0, "step": 20, "results": {"held_loss": 3.5}}\n'
    (tmp_path / RESULTS).write_text(f'{{"t": 1.0, "ste{good}\0\0{good}{good}')
    for _ in range(2):
        begin(tmp_path).close()
    (event,) = events(tmp_path)
    assert (event["step"], event["results"]) == (20, {"held_loss": 3.5})


# Results of lm-evaluation-harness and lighteval, as these write them.


LM_EVAL = {
    "results": {
        "hellaswag": {
            "alias": "hellaswag", "sample_len": 4, "acc,none": 0.25, "acc_stderr,none": 0.01, "acc_norm,none": 0.5,
            "acc_norm_stderr,none": "N/A",
        },
        "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.75, "exact_match_stderr,strict-match": 0.1},
    },
    "group_subtasks": {}, "config": {"model": "hf"},
}  # fmt: skip

LIGHTEVAL = {
    "config_general": {"model_name": "m"},
    "results": {
        "leaderboard|arc:challenge|0": {"acc": 0.25, "acc_stderr": 0.01},
        "all": {"acc": 0.25, "acc_stderr": 0.01},
    },
}


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / "models__m" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LM_EVAL, {"hellaswag_acc": 0.25, "hellaswag_acc_norm": 0.5, "gsm8k_exact_match_strict_match": 0.75}),
        (LIGHTEVAL, {"arc_challenge_acc": 0.25, "all_acc": 0.25}),
    ],
)
def test_numbers_are_taken_by_task_and_metric(tmp_path: Path, content: object, expected: dict[str, float]) -> None:
    """Of the newest file; standard errors stand by themselves, names and other text are left out."""
    older = write(tmp_path, "results_2026-01-01T00-00-00.json", '{"results": {"old": {"acc": 1}}}')
    os.utime(older, (1, 1))
    write(tmp_path, "results_2026-01-02T00-00-00.json", json.dumps(content))
    results, errors = read_results(tmp_path)
    assert results == expected
    assert errors == {name: 0.1 if "gsm8k" in name else 0.01 for name in errors}
    assert errors.keys() <= expected.keys()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "wrote no results_….json with numbers"),
        ('{"results": {"task": {"alias": "task"}}}', "wrote no results_….json with numbers"),
        ("{", "results.json is no file of results"),
        ('{"results": [1]}', "results.json is no file of results"),
        ("{}", "results.json is no file of results"),
    ],
)
def test_what_are_no_results_is_said(tmp_path: Path, content: str | None, sentence: str) -> None:
    """No file, no numbers, or something else altogether."""
    if content is not None:
        write(tmp_path, "results.json", content)
    with pytest.raises(HarnessError, match=re.escape(sentence)):
        read_results(tmp_path)
