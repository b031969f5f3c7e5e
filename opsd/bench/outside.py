"""Material from outside this project, by which detection is judged.

Recorded hangs of a job on 16 GPUs (``tests/outside/fr_traces``): which ranks stopped the others.

They are judged after the fact, so that there is no latency.
"""

from __future__ import annotations

import csv
import math
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from opsd.collectors.lib.nccl.desync import judge as judge_dumps
from opsd.collectors.lib.nccl.desync import read_dumps
from opsd.launch.run.slow_ranks import SURE
from opsd.scenarios.model import Scenario
from opsd.scenarios.player import Hit, ScenarioResult, play
from opsd.scenarios.player import judge as judge_scenario
from opsd.stragglers.judge import LEAST_STEPS
from opsd.stragglers.judge import judge as judge_steps
from opsd.stragglers.table import read_table, to_trace
from opsd.stragglers.trace import COMPUTE, LENGTHS, SLOW_WORKER, STAGES, Place, Trace

CULPRITS: Mapping[str, tuple[int, ...]] = {
    "gpu_error_1st": (12,), "gpu_error_2nd": (9, 14), "lock_gil_1st": (9, 14), "lock_gil_2nd": (10, 15),
}  # fmt: skip
"""The ranks that the source names."""


def flight_results(folder: Path) -> Iterator[ScenarioResult]:
    """The result of each hang, from the folder of all sets."""
    yield from judged_flights(folder / "fr_traces")


def judged_flights(folder: Path) -> Iterator[ScenarioResult]:
    """The result of each hang, from the folder that has one for each."""
    for case, culprits in CULPRITS.items():
        verdict = judge_dumps(read_dumps(folder / case).dumps)
        if verdict is None:
            yield ScenarioResult((), ("collective_hang",), (), (f"{case}: no verdict",))
            continue
        right = verdict.culprits == culprits
        problems = () if right else (f"{case}: {verdict.culprits} instead of {culprits}",)
        yield ScenarioResult((Hit("collective_hang", None, right),), (), (), problems)


# Lines of kernels and drivers (``tests/outside/kernel_lines``), each played through the whole agent.


INCIDENTS: Mapping[str, str] = {
    "edac_uncorrected": "machine_check",
    "edac_corrected": "machine_check",
    "mce": "machine_check",
    "oom_kill": "oom_kill",
    "nvme": "disk_errors",
    "io_error": "disk_errors",
    "read_only": "disk_errors",
    "aer_fatal": "pcie_error",
    "aer_recovery": "pcie_error",
    "soft_lockup": "kernel_lockup",
    "hard_lockup": "kernel_lockup",
    "hung_task": "kernel_lockup",
    "cpu_thermal": "cpu_thermal",
    "gpu_init": "gpu_driver_failed",
    "mlx5_tx_timeout": "nic_failed",
    "mlx5_cq_error": "nic_failed",
    "mlx5_health": "nic_failed",
    "mlx5_trouble": "nic_degrading",
    "nic_silent": "nic_failed",
    "nic_unanswered": "nic_failed",
    "peermem": "gpu_driver_failed",
    "lustre": "lustre_client",
    "evicted": "lustre_client",
    "storage_lost": "storage_slow",
    "raid": "disk_errors",
    "oops": "kernel_oops",
    "clock": "clock_unstable",
    "iommu": "pcie_error",
}
"""The subject of a line, and the incident that it must open."""

ELSEWHERE: Mapping[str, str] = {"was lost": "storage_slow"}
"""Lines whose incident another runbook opens."""

REPEATED: Mapping[str, int] = {"edac_corrected": 100, "cpu_thermal": 2}
"""A storm takes so many of them."""

_AT_S, _AFTER_S, _STORM_S = 10.0, 30.0, 70.0


def lines(folder: Path) -> Iterator[tuple[str, str]]:
    """Each line of the set in ``folder`` with what it is about, or benign, or harmless_event."""
    for source in tomllib.loads((folder / "lines.toml").read_text(encoding="utf-8"))["source"]:
        for about, said in source.items():
            if about != "of":
                yield from ((about, line) for line in said)


def expected(about: str, line: str) -> str | None:
    """The incident that ``line`` must open, None if none may."""
    return next((kind for words, kind in ELSEWHERE.items() if words in line), INCIDENTS.get(about))


def kernel_results(folder: Path) -> Iterator[ScenarioResult]:
    """The result of each line."""
    for about, line in lines(folder / "kernel_lines"):
        scenario = timeline(about, line)
        yield judge_scenario(scenario, play(scenario, "observe"))


def timeline(about: str, line: str) -> Scenario:
    """A node whose kernel says ``line``, and again if it takes a storm."""
    times = REPEATED.get(about, 1)
    every = 1.0 if times > 10 else _STORM_S
    kind = expected(about, line)
    last = _AT_S + (times - 1) * every
    return Scenario.model_validate({
        "title": about, "duration": last + _AFTER_S,
        "at": [{"t": _AT_S, "every": every, "times": times, "kernel": [line]}],
        "expect": [{"kind": kind, "at": _AT_S, "within": last + _AFTER_S, "culprit": {"node": "n01"}}] if kind else [],
    })  # fmt: skip


# Step times of real jobs (``tests/outside/step_times``): the cause, the culprit, and the slowdown within 10 %.
#
# They are judged after the fact, so that there is no latency.


ALSO: Mapping[str, tuple[str, ...]] = {"SE": (STAGES,)}
"""Further causes, without a slowdown of their own: the last stage explains 0.69 of the slowdown by ``ms-SE.json``."""

TRUTH: Mapping[str, tuple[str, float, tuple[int, ...]]] = {
    "AR": (SLOW_WORKER, 1.973, (0,)),
    "ST": (STAGES, 1.179, ()),
    "SE": (LENGTHS, 1.537, ()),
}
"""The main cause, the slowdown and the culprits that the source found."""


def step_results(folder: Path) -> Iterator[ScenarioResult]:
    """The result of each trace, from the folder of all sets."""
    yield from judged_steps(folder / "step_times", "{}.csv")


def judged_steps(folder: Path, file: str) -> Iterator[ScenarioResult]:
    """The result of each trace; ``file`` is its name with a place for that of the trace.

    A cause that is not the source's is one that was missed and one too many.
    """
    for name, (cause, slowdown, culprits) in TRUTH.items():
        trace = read_table(folder / file.format(name))
        verdicts = judge_steps(trace)
        found = [verdict.cause for verdict in verdicts]
        if cause not in found:
            yield ScenarioResult((), (cause,), tuple(found), (f"{name}: {found} instead of {cause}",))
            continue
        verdict = verdicts[found.index(cause)]
        right = verdict.culprits == culprits and abs(verdict.slowdown / slowdown - 1) <= 0.1
        also, last = ALSO.get(name, ()), max(place.pp for place in trace.places.values())
        right = right and verdict.stage in (None, last)
        hits = [Hit(cause, None, right)]
        hits += [Hit(other.cause, None, other.stage == last) for other in verdicts if other.cause in also]
        missed = tuple(other for other in also if other not in found)
        others = tuple(other for other in found if other not in (cause, *also))
        problems = () if right else (f"{name}: {verdict.culprits}, {verdict.slowdown:.2f}",)
        yield ScenarioResult(tuple(hits), missed, others, problems)


# Larger sets than those under ``tests/outside``, in clones that whoever runs it has made below one folder.
#
# ========================= =====================================================================================
# clone of                  what is judged
# ========================= =====================================================================================
# StragglerAnalysis         the traces as published (Parquet, which needs pyarrow): cause, culprit, slowdown
# nvidia-resiliency-ext     the dumps of four hangs: which ranks
# clusterdata               batch times of four jobs, and the variation of a hundred: windows in which the launcher
#                           announces a worker that takes no longer than the others in the sixty steps around
# ========================= =====================================================================================
#
# A clone that is not there is left out.


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
        found["StragglerAnalysis"] = list(judged_steps(folder / TRACES, "trace-{}.parquet"))
    if (folder / DUMPS).is_dir():
        found["nvidia-resiliency-ext"] = list(judged_flights(folder / DUMPS))
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
    verdicts = judge_steps(Trace(trace.places, trace.steps[part], seconds), uneven=False)
    return {rank for verdict in verdicts if verdict.confidence >= sure for rank in verdict.culprits}


# Material from outside this project, by which detection is judged. Each set is registered in ``SETS``.
#
# A set is a small folder under ``tests/outside`` with its source and licence.


FOLDER = Path(__file__).parents[2] / "tests" / "outside"

SETS: Mapping[str, Callable[[Path], Iterator[ScenarioResult]]] = {
    "flight_recorder": flight_results,
    "kernel_lines": kernel_results,
    "step_times": step_results,
}
"""The results of the cases of each set, from the folder of all sets."""
