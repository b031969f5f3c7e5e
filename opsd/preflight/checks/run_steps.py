"""Real steps of the run on this node, with a rank killed on the way: training has to go on by itself.

Measures speed, memory and checkpoints of the run's own model, compares the speed with the prediction, and reads the
last checkpoint back. The layout must fit onto one node; the global batch is cut down to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from opsd.checkpoints.manifest import CheckpointError, Manifest, folder_of, steps, verify
from opsd.preflight import drill
from opsd.preflight.base import Check, Context, CouldNotRunError, Finding, Measure, Measurement, Outcome, Progress
from opsd.preflight.base import Verdict as V
from opsd.preflight.plan import predict
from opsd.preflight.training import config_of, devices_of
from opsd.preflight.units import quantity

if TYPE_CHECKING:
    from trainer.config import Config

SAVE_EVERY: Final = 10
STEPS: Final = 40
SETTINGS: Final = (
    f"checkpoint.every={SAVE_EVERY}", "checkpoint.minutes=0", "checkpoint.mttf_hours=0", "evaluation.perplexity={}",
    "evaluation.cloze={}",
)  # fmt: skip
"""Evaluating is tried by a check of its own."""
POLL_S: Final = 0.2
AS_PREDICTED: Final = 0.7
"""A run that reaches less than this share of the predicted speed has something wrong with it."""


def run(context: Context, progress: Progress) -> Outcome:
    """Train under the launcher, kill the last rank once a checkpoint is durable, and look at what becomes of it."""
    config = config_of(context)
    ranks = devices_of(context)
    with tempfile.TemporaryDirectory(prefix="opsd-drill-", dir=context.local_dir or None) as name:
        folder = Path(name)
        process, output = drill.start(context, config, ranks, folder, STEPS, SETTINGS)
        try:
            killed = _drill(folder, lambda: process.poll() is not None, progress)
            code = process.wait(timeout=context.seconds * 3)
        except subprocess.TimeoutExpired:
            raise CouldNotRunError(f"{STEPS} steps did not end in time; see {output}") from None
        finally:
            process.kill()
            process.wait()
        last = drill.last_line(output)
        if killed is None:
            raise CouldNotRunError(f"the run ended with {code} before a checkpoint was durable: {last}")
        return _outcome(folder, config, ranks, killed, code, last)


def _drill(folder: Path, ended: Callable[[], bool], progress: Progress) -> float | None:
    """Kill the last rank after the first durable checkpoint; the wall second, None if the run ended before."""
    while not ended():
        progress(min(0.9, len(_metrics(folder)) / STEPS), "")
        events = drill.events(folder)
        started = [event for event in events if event["event"] == "generation_started"]
        if started and any(event["event"] == "checkpoint_committed" for event in events):
            os.kill(int(started[-1]["ranks"][-1]["pid"]), signal.SIGKILL)
            return time.time()
        time.sleep(POLL_S)
    return None


def _outcome(folder: Path, config: Config, ranks: int, killed: float, code: int, last: str) -> Outcome:
    resumed = next((e["t"] for e in drill.events(folder) if e["event"] == "resumed" and e["t"] > killed), None)
    if code or resumed is None:
        summary = f"after a rank was killed the run did not go on (exit code {code}): {last}"
        return Outcome((), (Finding(V.FAIL, summary, "read its logs; no month-long run survives without this"),))
    lines = [line for line in _metrics(folder) if line["step"] > 2]
    speed = median(line["tokens_per_s"] for line in lines)
    measured = [Measurement("speed", speed), Measurement("resume", resumed - killed)]
    found = list(_slow(speed, config, ranks))
    try:
        saved = _last_checkpoint(folder)
    except CheckpointError as error:
        found.append(Finding(V.FAIL, f"the last checkpoint cannot be read back: {error}", "look at the storage"))
    else:
        measured.append(Measurement("checkpoint", sum(file.size for file in saved.files)))
    return Outcome(tuple(measured), tuple(found))


def _slow(speed: float, config: Config, ranks: int) -> Iterator[Finding]:
    expected = predict(config, ranks).tokens_per_s
    if expected and speed < AS_PREDICTED * expected:
        speeds = quantity(speed, "tokens_per_second"), quantity(expected, "tokens_per_second")
        advice = "see `opsd runbook show throughput_drop`"
        yield Finding(V.WARN, f"{speeds[0]} where {speeds[1]} were predicted", advice)


def _last_checkpoint(folder: Path) -> Manifest:
    """Read the newest checkpoint back, checksums included. Raises CheckpointError."""
    root = folder / "checkpoints"
    saved = steps(root)
    if not saved:
        raise CheckpointError(f"{root} has none")
    return verify(folder_of(root, saved[-1]))


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return drill.lines(folder / "metrics.jsonl")


CHECK = Check(
    name="run_steps",
    title="Steps of the run, with a rank killed",
    run=run,
    seconds={"standard": 120, "burn-in": 300},
    measures=(
        Measure("speed", "tokens_per_second", "throughput of this node", "higher", noise=0.1, required=False),
        Measure("resume", "seconds", "kill of a rank to the first new step", "lower", noise=1.0, required=False),
        Measure("checkpoint", "bytes", "size of a checkpoint", required=False),
    ),
    needs=frozenset({"exclusive"}),
    advice="read the logs of the ranks",
    runbook="rank_crash",
)
