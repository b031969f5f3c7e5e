"""Larger sets than those under ``tests/outside``, in clones that whoever runs it has made below one folder.

========================= =====================================================================================
clone of                  what is judged
========================= =====================================================================================
StragglerAnalysis         the traces as published (Parquet, which needs pyarrow): cause, culprit, slowdown
nvidia-resiliency-ext     the dumps of four hangs: which ranks
clusterdata               batch times of four jobs, and the variation of a hundred: windows in which the launcher
                          announces a worker that takes no longer than the others in the sixty steps around
========================= =====================================================================================

A clone that is not there is left out.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from opsd.bench.outside import flight_recorder, step_times
from opsd.launch.run.slow_ranks import SURE
from opsd.stragglers.judge import LEAST_STEPS, judge
from opsd.stragglers.table import to_trace
from opsd.stragglers.trace import COMPUTE, Place, Trace

TRACES = "StragglerAnalysis/data"
DUMPS = "nvidia-resiliency-ext/tests/attribution/unit/fr_traces"
BATCHES = "clusterdata/cluster-trace-gpu-v2020/mini-batch-time/data"
WORKERS = 10
"""Of each job of which only the variation is published."""
STRAGGLERS = {"job_1_norm": 6}
"""What the source says: in the middle of job 1 worker 6 becomes slow."""
AROUND, SLOWER = 30, 1.05
"""A worker that takes so many times as long as usual in the steps before and after is named with reason."""


def judged(folder: Path) -> dict[str, Any]:
    """What is judged of each clone: results of the first two, counts of windows of the third."""
    found: dict[str, Any] = {}
    if (folder / TRACES).is_dir():
        found["StragglerAnalysis"] = list(step_times.judged(folder / TRACES, "trace-{}.parquet"))
    if (folder / DUMPS).is_dir():
        found["nvidia-resiliency-ext"] = list(flight_recorder.judged(folder / DUMPS))
    if (folder / BATCHES).is_dir():
        found["clusterdata"] = {
            path.stem: alarms(batches(path), known=STRAGGLERS.get(path.stem))
            for path in sorted((folder / BATCHES).glob("job_*.csv"))
        }
        variation = folder / BATCHES / "coefficient_variation.csv"
        if variation.exists():
            jobs = [alarms(trace, LEAST_STEPS) for trace in drawn(variation)]
            found["clusterdata"]["variation of a hundred jobs"] = {
                key: sum(job[key] for job in jobs) for key in ("windows", "announced", "false")
            }
    return found


def batches(path: Path) -> Trace:
    """The batch times of a job as published: a row for each worker and step."""
    with path.open(encoding="utf-8") as file:
        return to_trace(
            {"rank": row["worker"], "step": row["time"], "compute": row["batch_time_norm"]}
            for row in csv.DictReader(file)
        )


def drawn(path: Path) -> Iterator[Trace]:
    """Jobs whose workers are equal, with the variation between workers that each job had in each step, drawn."""
    with path.open(encoding="utf-8") as file:
        for number, (_, *cells) in enumerate(csv.reader(file)):
            steps = [float(cell) for cell in cells if cell]
            if number and steps:
                rng = random.Random(number)
                rows = [_lognormal(rng, variation) for variation in steps]
                seconds = {worker: [row[worker] for row in rows] for worker in range(WORKERS)}
                yield Trace(dict.fromkeys(range(WORKERS), Place()), range(len(rows)), {COMPUTE: seconds})


def _lognormal(rng: random.Random, variation: float) -> list[float]:
    sigma = math.sqrt(math.log1p(variation * variation))
    return [rng.lognormvariate(0.0, sigma) for _ in range(WORKERS)]


def alarms(trace: Trace, stride: int = 1, known: int | None = None) -> Mapping[str, int]:
    """``windows`` of five steps, those in which anybody is ``announced``, and those in which somebody is wrongly.

    Announced is who is named for sure, or in the next step as well. ``known`` is a straggler that the source names.
    """
    work, found = trace.work(), {"windows": 0, "announced": 0, "false": 0}
    for begin in range(0, len(trace.steps) - LEAST_STEPS, stride):
        named = _announced(trace, begin)
        around = slice(max(0, begin - AROUND), begin + LEAST_STEPS + AROUND)
        usual = median(median(row[around]) for row in work.values()) if named else 0.0
        found["windows"] += 1
        found["announced"] += bool(named)
        found["false"] += any(rank != known and median(work[rank][around]) < SLOWER * usual for rank in named)
    return found


def _announced(trace: Trace, begin: int) -> set[int]:
    first = _named(trace, begin, 0.0)
    return _named(trace, begin, SURE) | (first & _named(trace, begin + 1, 0.0)) if first else first


def _named(trace: Trace, begin: int, sure: float) -> set[int]:
    """Who is named in the window that begins with step number ``begin``."""
    part = slice(begin, begin + LEAST_STEPS)
    seconds = {phase: {rank: row[part] for rank, row in rows.items()} for phase, rows in trace.seconds.items()}
    verdicts = judge(Trace(trace.places, trace.steps[part], seconds), uneven=False)
    return {rank for verdict in verdicts if verdict.confidence >= sure for rank in verdict.culprits}
