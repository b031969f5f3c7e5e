"""The clock: is it synchronised, and how large may its error be? Logs, Slurm's credentials and TLS depend on it.

Asks the kernel (adjtimex(2), STA_UNSYNC and the maximum error), which every time service updates, and chrony, if it
runs, for the measured offset.
"""

from __future__ import annotations

import shutil
import subprocess

from opsd.collectors.lib.clock import read_clock
from opsd.preflight.base import Bounds, Check, Context, Finding, Measure, Measurement, Outcome, Progress, Verdict


def run(context: Context, progress: Progress) -> Outcome:
    """Read the clock state from the kernel and from chrony."""
    clock = read_clock()
    tracking = _chrony()
    measurements, findings = [], []
    if tracking is not None:
        measurements.append(Measurement("offset", abs(tracking)))
    elif clock.synchronised:
        measurements.append(Measurement("offset", abs(clock.offset_s)))
    if clock.synchronised:
        measurements.append(Measurement("max_error", clock.max_error_s))
    elif tracking is None:
        advice = "start chronyd or systemd-timesyncd; Slurm refuses credentials of a clock that is minutes off"
        findings.append(Finding(Verdict.WARN, "no service keeps the clock synchronised", advice))
    return Outcome(tuple(measurements), tuple(findings))


def _chrony() -> float | None:
    """The clock offset in seconds according to chrony, None if it does not run or has no source yet."""
    if shutil.which("chronyc") is None:
        return None
    try:
        answer = subprocess.run(
            ["chronyc", "-c", "tracking"], capture_output=True, text=True, timeout=5, check=False
        ).stdout
    except subprocess.TimeoutExpired:
        return None
    return parse_tracking(answer)


def parse_tracking(text: str) -> float | None:
    """The system clock's offset in seconds from `chronyc -c tracking`; None without a selected source.

    The fields are those of `chronyc tracking` in order: reference id, name, stratum, reference time, system time (5th),
    leap status last.
    """
    fields = text.strip().split(",")
    if len(fields) < 14 or fields[-1] == "Not synchronised":
        return None
    return float(fields[4])


CHECK = Check(
    name="clock",
    title="Clock synchronisation",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "burn-in", "spare"), 1),
    measures=(
        Measure("offset", "seconds", "clock offset", "lower", Bounds(warn=0.01, fail=1.0), noise=99, required=False),
        Measure("max_error", "seconds", "possible clock error", "lower", Bounds(warn=1.0), noise=99, required=False),
    ),
    advice="check the time source with `chronyc sources`",
)
