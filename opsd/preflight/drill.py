"""A few real steps of the run under the launcher, in a separate folder and invisible to the node's agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsd.preflight.base import Context

if TYPE_CHECKING:
    from opsd.trainer.config import Config


EVENTS = "drill.jsonl"


def start(
    context: Context, config: Config, ranks: int, folder: Path, steps: int, settings: Sequence[str]
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the launcher with the trainer; returns it with the file of their output.

    The global batch is reduced to one micro-batch per rank, or one per pipeline stage.
    """
    readers = max(1, ranks // (config.parallel.tp * config.parallel.pp * config.parallel.cp))
    batch = readers * config.data.shape_at(1).micro_batch * config.parallel.pp
    command = [
        sys.executable, "-P", "-m", "opsd", "launch", f"--nproc-per-node={ranks}", "--standalone", "--redirects=3",
        f"--run-id=drill-{os.getpid()}", f"--run-dir={folder}", f"--events={folder / EVENTS}",
        *program(context, config, folder, steps, batch, settings),
    ]  # fmt: skip
    output = folder / "output"
    with output.open("wb") as file:
        environment = {**os.environ, "OPSD_SHM": str(folder / "shm")}
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT), output


def program(
    context: Context, config: Config, folder: Path, steps: int, batch: int, settings: Sequence[str]
) -> list[str]:
    """The trainer with the run's configuration, except for ``steps`` of a ``batch`` of samples, in ``folder``.

    They are steps of the run's first stage.
    """
    first = config.data.shape_at(1)
    changed: dict[str, object] = {
        "data.sequence": first.sequence,
        "data.micro_batch": first.micro_batch,
        "data.batch": batch,
    }
    changed |= {f"model.{name}": value for name, value in first.rope}
    if config.data.stages:
        weights = ", ".join(f"{json.dumps(name)} = {weight}" for name, weight in config.data.stages[0].weights.items())
        changed |= {"data.mixture": "", "data.stages": f"[{{start = 1, weights = {{{weights}}}}}]"}
    all_settings = [
        *context.overrides, f"run.steps={steps}", f"run.folder={folder}", "data.batch_warmup=[]",
        *(f"{name}={value}" for name, value in changed.items()),
        f"schedule.decay_end={max(config.schedule.decay_end, steps)}", "checkpoint.remote=", *settings,
    ]  # fmt: skip
    return ["-m", "opsd.trainer", context.train, *(f"--set={setting}" for setting in all_settings)]


def storage_of(context: Context, config: Config) -> Path | None:
    """Where the run's checkpoints will be written, or the node's own storage if that is not writable."""
    folder = Path(config.run.folder).absolute()
    there = next((path for path in (folder, *folder.parents) if path.is_dir()), None)
    if there is not None and os.access(there, os.W_OK):
        return there
    return Path(context.local_dir) if context.local_dir else None


def events(folder: Path) -> list[dict[str, Any]]:
    """The events of the launcher and the ranks so far."""
    return lines(folder / EVENTS)


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may still be growing."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines() if line]


def last_line(path: Path) -> str:
    """The last line of a failed program's output."""
    printed = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(printed) if line.strip()), "it printed nothing")
