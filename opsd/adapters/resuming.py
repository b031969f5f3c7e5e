"""The checkpoint from which a training of this run goes on, and whether it goes on with the same data.

After each save the first rank writes ``transformers.json`` in the run's folder. It has the checkpoint and what the
training is made of: data, samples of a step, seeds, planned steps. transformers finds its place in the data by counting
steps, so it is right only while these stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opsd import durable
from opsd.posttrain.rows import digest

FILE = "transformers.json"
STATE = "trainer_state.json"
"""What transformers writes last into a checkpoint."""
SAMPLED = 256
Plan = dict[str, Any]


class ResumeError(Exception):
    """It is not known where the training goes on, or its checkpoint is gone; the message says what to do."""


def plan_of(trainer: Any) -> Plan:
    """What decides which samples a step has; ``data`` is None for a stream."""
    arguments = trainer.args
    samples = arguments.per_device_train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps
    return {
        "planned_steps": int(trainer.state.max_steps),
        "samples_of_a_step": int(samples),
        "seeds": [arguments.seed, arguments.data_seed],
        "rollouts_of_a_prompt": getattr(arguments, "num_generations", None),
        "data": data_digest(trainer.train_dataset),
    }


def data_digest(data: Any) -> str | None:
    """Of the number of rows, and of at most ``SAMPLED`` of them from all over the data set; None for a stream."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or not len(data):
        return None
    found, length = hashlib.blake2b(str(len(data)).encode(), digest_size=12), len(data)
    count = min(length, SAMPLED)
    for at in range(count):
        row = data[at * length // count]
        found.update(digest(row) if isinstance(row, Mapping) else b"?")
    return found.hexdigest()


def problems(before: Plan, now: Plan, step: int, *, skips_data: bool = False) -> list[str]:
    """Why a training with the plan ``now`` does not go on from ``step`` of one with the plan ``before``. Pure."""
    found = []
    if skips_data:
        found.append("ignore_data_skip begins with the first sample again: leave it out.")
    if before.get("data") != now.get("data"):
        found.append("The data set is not the one of the checkpoint: samples would be trained twice, or never.")
    for name, what in (
        ("samples_of_a_step", "samples of a step"),
        ("rollouts_of_a_prompt", "rollouts of a prompt"),
        ("seeds", "seeds"),
    ):
        if before.get(name) != now.get(name):
            found.append(
                f"The {what} were {before.get(name)} and are {now.get(name)}: the order of the data is another."
            )
    if step > now.get("planned_steps", 0):
        found.append(f"Step {step} is done, and only {now.get('planned_steps')} are planned.")
    return found


def keep(run: str | None, output: str, step: int, plan: Plan) -> None:
    """Note that the checkpoint of ``step`` below ``output`` is there. A run without a folder has no record."""
    if not run:
        return
    path = Path(run, FILE)
    known: dict[str, Any] = {}
    try:
        known = _read(path)
    except ResumeError as error:
        print(f"opsd: {error}; it is written anew", file=sys.stderr, flush=True)
    known[_name(output)] = {"step": step, "checkpoint": str(Path(output, f"checkpoint-{step}").resolve()), "plan": plan}
    try:
        durable.replace(path, json.dumps(known, indent=1).encode())
    except OSError as error:
        print(f"opsd: {path} cannot be written: {error.strerror}; a restart begins again", file=sys.stderr, flush=True)


def known(run: str | None, output: str) -> dict[str, Any] | None:
    """The record of the training into ``output``: step, checkpoint, plan. None if there is none. Raises ResumeError."""
    found = _read(Path(run, FILE)).get(_name(output)) if run else None
    return found if isinstance(found, dict) and {"step", "checkpoint", "plan"} <= found.keys() else None


def chosen(given: Any, run: str | None, output: str) -> Any:
    """What ``trainer.train`` is to resume from if the program says ``given``: a checkpoint that is complete, or None.

    A rank that dies while it saves leaves a folder without a state. ``resume_from_checkpoint=True``, and the path from
    transformers' ``get_last_checkpoint``, are such a folder then, and each start fails. Raises ResumeError.
    """
    if given is None:
        return last_saved(run, output)
    if given is not True and not _is_incomplete(given):
        return given
    if (saved := last_saved(run, output)) is not None:
        return saved
    found = [path for path in Path(output).glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    complete = [path for path in found if (path / STATE).is_file()]
    if complete:
        return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2])))
    return given if given is True and not found else None


def _is_incomplete(given: Any) -> bool:
    path = Path(given) if isinstance(given, str | os.PathLike) else None
    return path is not None and path.name.startswith("checkpoint-") and path.is_dir() and not (path / STATE).is_file()


def last_saved(run: str | None, output: str) -> str | None:
    """The checkpoint from which the training goes on, None if this run has saved none.

    Raises ResumeError if it is gone: to begin again would train the same samples twice, and end with exit code 0.
    """
    record = known(run, output)
    if record is None:
        return None
    if not Path(record["checkpoint"], STATE).is_file():
        raise ResumeError(
            f"the run has saved {record['checkpoint']}, and it is not there: put it back, pass resume_from_checkpoint, "
            f"or remove {Path(str(run), FILE)} to begin again"
        )
    return str(record["checkpoint"])


def _name(output: str) -> str:
    return os.path.realpath(output)


def _read(path: Path) -> dict[str, Any]:
    """Raises ResumeError for a file that is there and cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ResumeError(f"{path} cannot be read ({error}): remove it to begin again") from error
    if not isinstance(found, dict):
        raise ResumeError(f"{path} is not a record of trainings: remove it to begin again")
    return found
