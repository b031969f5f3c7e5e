"""lm-evaluation-harness and lighteval, if installed, as evaluators of a run's checkpoints.

Both take a Hugging Face model and write ``results_….json``, in which ``results`` maps each task to its numbers. They
become results named TASK_METRIC: ``hellaswag_acc_norm`` from lm-evaluation-harness's ``acc_norm,none``, and
``arc_challenge_acc`` from lighteval's task ``leaderboard|arc:challenge|0``. Their standard errors are kept beside them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL, OUTPUT = "{model}", "{output}"
"""Placeholders in the command for the folders of the model and of the results."""
LOG = "harness.log"
"""What the command last wrote, in the folder of the evaluation's scores."""
_STDERR, _NO_RESULT = "_stderr", "sample_len"
_TAIL = 4096


class HarnessError(Exception):
    """A harness has failed, or has written no results; the message says how."""


Results = tuple[dict[str, float], dict[str, float]]
"""The results by name, and the standard errors of those that have one."""


def run(command: str, model: Path, kept: Path) -> Results:
    """The results of ``command`` for the folder ``model``; its output goes into the folder ``kept``.

    Raises HarnessError with the last line of its output, or OSError.
    """
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="opsd-evaluation-") as name:
        output = Path(name)
        words = [word.replace(MODEL, str(model)).replace(OUTPUT, name) for word in shlex.split(command)]
        with open(kept / LOG, "wb") as log:
            try:
                done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
            except OSError as error:
                raise HarnessError(f"{words[0]} cannot be run: {error.strerror}") from error
        if done.returncode:
            last = _last_line(kept / LOG)
            raise HarnessError(f"{words[0]} ended with status {done.returncode}{last}")
        return read_results(output)


def _last_line(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        lines = file.read().decode(errors="replace").split("\n")
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {line}; all it wrote is in {log}" if line else ""


def read_results(folder: Path) -> Results:
    """The numbers in the newest results under ``folder``. Raises HarnessError if there are none."""
    files = sorted(folder.rglob("results*.json"), key=lambda path: path.stat().st_mtime)
    try:
        found = dict(_numbers(json.loads(files[-1].read_text(encoding="utf-8"))["results"])) if files else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HarnessError(f"{files[-1].name} is no file of results: {error!r}") from error
    if all(_STDERR in name for name in found):
        raise HarnessError(f"the harness wrote no results_….json with numbers into {OUTPUT}")
    return (
        {name: value for name, value in found.items() if _STDERR not in name},
        {name.replace(_STDERR, ""): value for name, value in found.items() if _STDERR in name},
    )


def _numbers(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for task, values in results.items():
        parts = task.split("|")
        short = parts[1] if len(parts) > 2 else task
        for name, value in values.items():
            metric, _, variant = name.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and metric != _NO_RESULT:
                full = f"{short}_{metric}" + (f"_{variant}" if variant not in ("", "none") else "")
                yield re.sub(r"\W", "_", full), float(value)
