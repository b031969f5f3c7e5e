"""Results of lm-evaluation-harness and lighteval, as these write them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from opsd.evaluations.harness import HarnessError, read_results

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
