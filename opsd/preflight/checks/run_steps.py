"""Real steps of the run on this node, with a rank killed on the way: training has to go on by itself.

Measures speed, memory and checkpoints of the run's own model and compares them with the prediction. Checkpoints have
their real size and are written to their real place; the last one is read back and verified. The layout must fit on one
node; the global batch is reduced to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from opsd.checkpoints.manifest import CheckpointError, Manifest, folder_of, steps, verify
from opsd.collectors.base import NoData
from opsd.collectors.lib.nvml import series as nvml
from opsd.collectors.nvml import NvmlCollector, NvmlError
from opsd.preflight import drill
from opsd.preflight.base import (
    Bounds,
    Check,
    Context,
    CouldNotRunError,
    Finding,
    Measure,
    Measurement,
    Outcome,
    Progress,
    duration,
    quantity,
)
from opsd.preflight.base import Verdict as V
from opsd.preflight.checks.storage import CHECKPOINT_SHARE
from opsd.preflight.training import config_of, devices_of, predict
from opsd.preflight.watch import Sampler

if TYPE_CHECKING:
    from opsd.trainer.config import Config

STEPS: Final = 40
POLL_S: Final = 0.2
AS_PREDICTED: Final = 0.7
"""A run below this share of the predicted speed has a problem."""
MEMORY_FACTOR: Final = 1.3
"""Allocator overhead; a run that needs more than this multiple of the prediction is a finding."""


def run(context: Context, progress: Progress) -> Outcome:
    """Train under the launcher, kill the last rank once a checkpoint is durable, and watch the recovery."""
    config = config_of(context)
    ranks = devices_of(context)
    with tempfile.TemporaryDirectory(prefix="opsd-drill-", dir=drill.storage_of(context, config)) as name:
        folder = Path(name)
        process, output = drill.start(context, config, ranks, folder, STEPS, drill.SETTINGS)
        try:
            with MemoryUse(lambda: _pids(folder), context.nvml_library) as memory_use:
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
        outcome = _outcome(folder, config, ranks, killed, code, last)
        return replace(
            outcome,
            measurements=(*outcome.measurements, *_used(memory_use)),
            findings=(*outcome.findings, *too_much(memory_use, predict(config, ranks).memory)),
        )


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
    found = [*of_ranks(drill.events(folder)), *_slow(speed, config, ranks)]
    began = time.perf_counter()
    try:
        saved = _last_checkpoint(folder)
    except CheckpointError as error:
        found.append(Finding(V.FAIL, f"the last checkpoint cannot be read back: {error}", "look at the storage"))
    else:
        size = sum(file.size for file in saved.files)
        measured += [Measurement("checkpoint", size), Measurement("read", size / (time.perf_counter() - began))]
        if seconds := _write_seconds(folder):
            measured.append(Measurement("write", size / seconds))
            found += too_slow(size, seconds, config, ranks)
    return Outcome(tuple(measured), tuple(found))


def _slow(speed: float, config: Config, ranks: int) -> Iterator[Finding]:
    expected = predict(config, ranks).tokens_per_s
    if expected and speed < AS_PREDICTED * expected:
        speeds = quantity(speed, "tokens_per_second"), quantity(expected, "tokens_per_second")
        advice = "see `opsd runbook show throughput_drop`"
        yield Finding(V.WARN, f"{speeds[0]} where {speeds[1]} were predicted", advice)


def of_ranks(events: Iterable[dict[str, Any]]) -> Iterator[Finding]:
    """The trainer's own findings from comparing ranks."""
    for event in events:
        ranks = ", ".join(map(str, event.get("ranks", ())))
        if event["event"] == "tp_shards_equal":
            summary = f"ranks {ranks} began with the same random numbers in different shards ({event['tensors'][0]})"
            yield Finding(V.FAIL, summary, "each tensor-parallel rank needs a seed of its own")
        elif event["event"] == "replicas_differ":
            summary = f"ranks {ranks} should hold the same {event['tensor']} and do not, at step {event['step']}"
            yield Finding(
                V.FAIL, summary, "burn in the GPUs of these ranks, and see `opsd runbook show replica_divergence`"
            )
        elif event["event"] == "replay_differs":
            summary = f"ranks {ranks} got other bits when they computed a micro-batch again, at step {event['step']}"
            yield Finding(
                V.FAIL, summary, "burn in the GPUs of these ranks, and see `opsd runbook show silent_corruption`"
            )


def _write_seconds(folder: Path) -> float | None:
    """Median seconds from the end of a step that saved to a durable checkpoint."""
    ended = {line["step"]: line["t"] for line in _metrics(folder)}
    events = [event for event in drill.events(folder) if event["event"] == "checkpoint_committed"]
    took = [event["t"] - ended[event["step"]] for event in events if event["step"] in ended]
    return median(positive) if (positive := [seconds for seconds in took if seconds > 0]) else None


def too_slow(size: int, seconds: float, config: Config, ranks: int) -> Iterator[Finding]:
    """A checkpoint of ``size`` bytes that becomes durable too late before the next one is due."""
    interval_s = predict(config, ranks).interval_s
    if interval_s and seconds > CHECKPOINT_SHARE * interval_s:
        took, due, what = duration(seconds), duration(interval_s), quantity(size, "bytes")
        verdict = V.FAIL if seconds > interval_s else V.WARN
        summary = f"a checkpoint of {what} took {took} to be durable, and one is due every {due}"
        yield Finding(verdict, summary, "save less often, or to faster storage")


def _used(memory_use: MemoryUse) -> Iterator[Measurement]:
    if memory_use.taken is not None:
        yield Measurement("memory", memory_use.taken)
    if memory_use.share is not None:
        yield Measurement("memory_share", memory_use.share)


def too_much(memory_use: MemoryUse, predicted: float | None) -> Iterator[Finding]:
    """More GPU memory than the ``predicted`` bytes; the memory of a CPU process also contains its libraries."""
    if predicted is None or memory_use.share is None or not memory_use.taken:
        return
    if memory_use.taken > MEMORY_FACTOR * predicted:
        sizes = quantity(memory_use.taken, "bytes"), quantity(predicted, "bytes")
        advice = "smaller micro-batches, parallel.recompute, or more devices"
        yield Finding(V.WARN, f"a GPU took {sizes[0]} where {sizes[1]} were predicted", advice)


def _pids(folder: Path) -> list[int]:
    """The ranks of the newest generation."""
    started = [event for event in drill.events(folder) if event["event"] == "generation_started"]
    return [int(rank["pid"]) for rank in started[-1]["ranks"]] if started else []


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
        Measure("write", "bytes_per_second", "checkpoint to durable", "higher", noise=0.5, required=False),
        Measure("read", "bytes_per_second", "checkpoint read and verified", "higher", noise=0.5, required=False),
        Measure("memory", "bytes", "most memory of a device or rank", required=False),
        Measure("memory_share", "ratio", "most of a GPU's memory", "lower", Bounds(warn=0.95), required=False),
    ),
    needs=frozenset({"run", "torch", "exclusive"}),
    advice="read the logs of the ranks",
    runbook="rank_crash",
)


_INTERVAL_S: Final = 0.5
_MIB: Final = 1 << 20


class MemoryUse(Sampler):
    """Samples between ``__enter__`` and ``__exit__``. ``pids`` returns the current ranks' processes.

    ``taken`` is the peak in bytes: of any device beyond its use at the start, or of any rank's resident memory; None if
    nothing was measured. ``share`` is the largest share of a GPU's memory in use, None without GPUs.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], library: str | None = None, proc: str = "/proc") -> None:
        super().__init__()
        self._pids, self._proc = pids, Path(proc)
        self._collector = NvmlCollector(library, profiling=False)
        self._before: dict[str, float] = {}
        self.taken: float | None = None
        self.share: float | None = None

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            used = self._gpus()
            self._before = self._before or used
            taken = [value - self._before.get(gpu, 0.0) for gpu, value in used.items()]
            if not used:
                taken = [size for pid in self._pids() if (size := resident(self._proc, pid)) is not None]
            if taken:
                self.taken = max(self.taken or 0.0, *taken)

    def _gpus(self) -> dict[str, float]:
        """Bytes in use by GPU."""
        try:
            reading = self._collector.collect()
        except NvmlError:
            return {}
        if isinstance(reading, NoData):
            return {}
        used = {s.labels[0]: s.value * _MIB for s in reading.samples if s.metric is nvml.FB_USED}
        total = {s.labels[0]: s.value for s in reading.samples if s.metric is nvml.MEMORY_TOTAL}
        shares = [value / total[gpu] for gpu, value in used.items() if total.get(gpu)]
        if shares:
            self.share = max(self.share or 0.0, *shares)
        return used


def resident(proc: Path, pid: int) -> float | None:
    """The peak resident memory of a process in bytes, None if it has ended."""
    with suppress(OSError):
        for line in (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return None
