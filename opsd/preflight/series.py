"""Clocks, temperature, power and errors of the whole node during a burn-in, as JSON lines.

``python -m opsd.preflight.series FILE SECONDS PARENT`` appends a line every SECONDS seconds until it is killed or its
parent has ended. It is a separate process, because a driver that hangs must not block anything else.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from opsd.collectors.base import Metric, NoData
from opsd.collectors.lib.nvml import series as nvml
from opsd.collectors.nvml import NvmlCollector, NvmlError
from opsd.preflight.base import Finding, Measurement, Outcome, Verdict
from opsd.preflight.history import Trend
from opsd.preflight.judge import Past

INTERVAL_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1
_HOST: Final = "processor"
_GAUGES: Final[Mapping[str, tuple[Metric, float]]] = {
    "clock": (nvml.SM_CLOCK, 1e6),
    "temperature": (nvml.GPU_TEMP, 1.0),
    "memory_temperature": (nvml.MEMORY_TEMP, 1.0),
    "power": (nvml.POWER_USAGE, 1.0),
}
_COUNTERS: Final[Mapping[str, tuple[Metric, tuple[str, ...]]]] = {
    "uncorrected_errors": (nvml.ECC_ERRORS, ("uncorrected", "volatile")),
    "corrected_errors": (nvml.ECC_ERRORS, ("corrected", "volatile")),
    "remapped_rows": (nvml.REMAPPED_UNCORRECTABLE, ()),
    "pcie_replays": (nvml.PCIE_REPLAYS, ()),
}
_TOLERATED: Final[Mapping[str, float]] = {"corrected_errors": 100.0, "pcie_replays": 100.0}
"""More than these are a warning; any of the other counters is a failure."""
_COUNTED: Final = (*_COUNTERS, "lost")
UNITS: Final[Mapping[str, str]] = {
    "clock": "hertz", "temperature": "celsius", "memory_temperature": "celsius", "power": "watts",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: the wall second, and by subject the value of each measure in base units."""

    t: float
    values: Mapping[str, Mapping[str, float]]


def take_sample(collector: NvmlCollector, sys_root: Path = Path("/sys")) -> dict[str, dict[str, float]]:
    """The present values; unreadable ones are left out, and a lost GPU is counted."""
    found: dict[str, dict[str, float]] = {}
    with suppress(NvmlError):
        reading = collector.collect()
        for sample in () if isinstance(reading, NoData) else reading.samples:
            of_gpu = found.setdefault(f"GPU {sample.labels[0]}", {}) if sample.labels else {}
            for name, (metric, scale) in _GAUGES.items():
                if sample.metric is metric:
                    of_gpu[name] = sample.value * scale
            for name, (metric, labels) in _COUNTERS.items():
                if sample.metric is metric and sample.labels[len(sample.labels) - len(labels) :] == labels:
                    of_gpu[name] = sample.value
            if sample.metric is nvml.UP:
                of_gpu["lost"] = 1.0 - sample.value
    return {subject: values for subject, values in {**found, _HOST: _host(sys_root)}.items() if values}


def _host(sys_root: Path) -> dict[str, float]:
    values: dict[str, float] = {}
    if frequency := psutil.cpu_freq():
        values["clock"] = frequency.current * 1e6
    hottest = [entry.current for sensor in psutil.sensors_temperatures().values() for entry in sensor]
    if hottest:
        values["temperature"] = max(hottest)
    controllers = sys_root / "devices/system/edac/mc"
    for name, file in (("corrected_errors", "ce_count"), ("uncorrected_errors", "ue_count")):
        counts = [int(path.read_text(encoding="ascii")) for path in controllers.glob(f"mc[0-9]*/{file}")]
        if counts:
            values[name] = sum(counts)
    return values


@contextmanager
def recording(file: Path, library: str | None = None) -> Iterator[None]:
    """Append to ``file`` in the background."""
    options = [str(file), str(INTERVAL_S), str(os.getpid()), library or ""]
    command = [sys.executable, "-P", "-m", "opsd.preflight.series", *options]
    process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def read(file: Path) -> list[Sample]:
    """All complete lines of ``file``, none without a file; a line cut off by a crash is skipped."""
    found = []
    with suppress(FileNotFoundError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                entry: dict[str, Any] = json.loads(line)
                found.append(Sample(float(entry["t"]), entry["values"]))
    return found


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """One curve per subject and gauge."""
    series: dict[tuple[str, str], list[Past]] = {}
    for at in samples:
        for subject, values in at.values.items():
            for name in values.keys() & UNITS.keys():
                series.setdefault((subject, name), []).append(Past(at.t, values[name]))
    return [
        Trend("burn_in", name, subject, UNITS[name], tuple(past)) for (subject, name), past in sorted(series.items())
    ]


def thinned(trend: Trend, points: int) -> Trend:
    """``trend`` as the medians of at most ``points`` equal parts of its time."""
    size = max(1, -(-len(trend.past) // points))
    parts = [trend.past[start : start + size] for start in range(0, len(trend.past), size)]
    return replace(trend, past=tuple(Past(part[0].at, median(entry.value for entry in part)) for part in parts))


def outcome(samples: Sequence[Sample]) -> Outcome:
    """The extremes of each gauge, and findings for counters that grew; one that shrank was reset."""
    measured, findings = [], []
    for trend in trends(samples):
        values = [entry.value for entry in trend.past]
        if trend.measure in ("temperature", "memory_temperature"):
            measured.append(Measurement(f"highest_{trend.measure}", max(values), trend.subject))
        elif trend.measure == "clock":
            measured.append(Measurement("lowest_clock", min(values), trend.subject))
    for subject in sorted({subject for at in samples for subject in at.values}):
        for name in _COUNTED:
            counts = [at.values[subject][name] for at in samples if name in at.values.get(subject, {})]
            grown = sum(max(0.0, after - before) for before, after in pairwise(counts))
            if grown > _TOLERATED.get(name, 0.0):
                verdict = Verdict.WARN if name in _TOLERATED else Verdict.FAIL
                text = "was lost" if name == "lost" else f"had {grown:.0f} {name.replace('_', ' ')}"
                findings.append(Finding(verdict, f"{subject} {text} during the burn-in", "have it replaced", subject))
    return Outcome(tuple(measured), tuple(findings))


def main(file: str, interval: str, parent: str, library: str = "") -> None:
    """Append until killed, or until the process ``parent`` has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return
    collector = NvmlCollector(library or None, profiling=False)
    with open(file, "a", encoding="utf-8") as out:
        while True:
            # A full disk costs a line, not the burn-in.
            with suppress(OSError):
                out.write(json.dumps({"t": round(time.time(), 3), "values": take_sample(collector)}) + "\n")
                out.flush()
            time.sleep(float(interval))


if __name__ == "__main__":
    main(*sys.argv[1:])
