"""lm-evaluation-harness and lighteval, if installed, as evaluators of a run's checkpoints.

Both take a Hugging Face model and write ``results_….json``, in which ``results`` maps each task to its numbers. They
become results named TASK_METRIC: ``hellaswag_acc_norm`` from lm-evaluation-harness's ``acc_norm,none``, and
``arc_challenge_acc`` from lighteval's task ``leaderboard|arc:challenge|0``. Standard errors are left out.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opsd.trainer.config import Config
from opsd.trainer.data.shards import DataError
from opsd.trainer.hf.export import export_checkpoint

MODEL, OUTPUT = "{model}", "{output}"
"""Placeholders in the command for the folders of the model and of the results."""
_NO_RESULT = re.compile(r"stderr|^sample_len$")


def run(config: Config, checkpoint: Path) -> dict[str, float]:
    """The results of the run's harness for ``checkpoint``. Raises DataError, CheckpointError or OSError."""
    with tempfile.TemporaryDirectory(prefix="opsd-evaluation-") as name:
        model, output = Path(name, "model"), Path(name, "results")
        export_checkpoint(config, checkpoint, model)
        words = [
            word.replace(MODEL, str(model)).replace(OUTPUT, str(output))
            for word in shlex.split(config.evaluation.harness)
        ]
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            raise DataError(f"evaluation.harness: {words[0]} cannot be run: {error.strerror}") from error
        if done.returncode:
            raise DataError(f"evaluation.harness: {words[0]} ended with status {done.returncode}")
        return read_results(output)


def read_results(folder: Path) -> dict[str, float]:
    """The numbers in the newest results under ``folder``. Raises DataError if there are none."""
    files = sorted(folder.rglob("results*.json"), key=lambda path: path.stat().st_mtime)
    try:
        found = dict(_numbers(json.loads(files[-1].read_text(encoding="utf-8"))["results"])) if files else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"evaluation.harness: {files[-1].name} is no file of results: {error!r}") from error
    if not found:
        raise DataError(f"evaluation.harness wrote no results_….json with numbers into {OUTPUT}")
    return found


def _numbers(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for task, values in results.items():
        parts = task.split("|")
        short = parts[1] if len(parts) > 2 else task
        for name, value in values.items():
            metric, _, variant = name.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and not _NO_RESULT.search(metric):
                full = f"{short}_{metric}" + (f"_{variant}" if variant not in ("", "none") else "")
                yield re.sub(r"\W", "_", full), float(value)
