"""Processor throughput: every core hashes at the same time, and none may lag the others.

SHA-256 stays in registers and the first-level cache, so a slower core is throttled, shares its hardware thread, or is
stolen by the hypervisor.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Final

from opsd.preflight.base import Check, Context, CouldNotRunError, Measure, Measurement, Outcome, Peers, Progress

_BLOCK: Final = bytes(1 << 20)
_SLICE_S: Final = 0.25


def run(context: Context, progress: Progress) -> Outcome:
    """Load all cores for ``context.seconds`` and keep every core's best slice, to ignore short disturbances."""
    cores = sorted(os.sched_getaffinity(0))
    rates: dict[int, float] = {}
    threads = [threading.Thread(target=_hash_on, args=(core, context.seconds, rates), daemon=True) for core in cores]
    for thread in threads:
        thread.start()
    frequencies = _sample_frequencies(Path(context.sys), cores, context.seconds, progress)
    for thread in threads:
        thread.join()
    if lost := [core for core in cores if core not in rates]:
        raise CouldNotRunError(f"no thread could be pinned to core {lost[0]}; is the node's cpuset changing?")
    return Outcome(
        measurements=(
            *(Measurement("throughput", rates[core], f"core {core}") for core in cores),
            *(Measurement("frequency", hertz, f"core {core}") for core, hertz in frequencies.items()),
        ),
        facts={"cores": str(len(cores))},
    )


def _hash_on(core: int, seconds: float, rates: dict[int, float]) -> None:
    os.sched_setaffinity(0, {core})
    end = time.perf_counter() + seconds
    best = 0.0
    while (began := time.perf_counter()) < end:
        count, stop = 0, min(end, began + _SLICE_S)
        while time.perf_counter() < stop:
            hashlib.sha256(_BLOCK).digest()
            count += 1
        best = max(best, count * len(_BLOCK) / (time.perf_counter() - began))
    rates[core] = best


def _sample_frequencies(sys: Path, cores: list[int], seconds: float, progress: Progress) -> dict[int, float]:
    """The highest clock of every core under load, in hertz; virtual machines report none."""
    highest: dict[int, float] = {}
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        progress(elapsed / seconds, "")
        for core in cores:
            try:
                path = sys / f"devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq"
                highest[core] = max(highest.get(core, 0.0), int(path.read_text(encoding="ascii")) * 1e3)
            except OSError:
                continue
        time.sleep(min(_SLICE_S, seconds))
    return highest


CHECK = Check(
    name="cpu",
    title="Processor throughput of every core",
    run=run,
    seconds={"quick": 2, "standard": 10, "burn-in": 60, "spare": 10},
    measures=(
        Measure(
            "throughput",
            "bytes_per_second",
            "SHA-256 throughput",
            better="higher",
            peers=Peers(warn=0.15, fail=0.35),
            noise=0.10,
        ),
        Measure(
            "frequency",
            "hertz",
            "clock under load",
            better="higher",
            peers=Peers(warn=0.15, fail=0.35),
            noise=0.10,
            required=False,
        ),
    ),
    needs=frozenset({"exclusive"}),
    advice="look for a stray process on that core, for thermal throttling and for a power-saving governor",
)
