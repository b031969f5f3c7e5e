"""Is the node idle? Pressure stall information says whether tasks wait for processors, memory or disks.

The kernel's documentation (accounting/psi.rst) defines "some" as the share of time in which at least one task was
stalled and "full" as that in which all were.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from opsd.preflight.base import Bounds, Check, Context, Measure, Measurement, NotApplicableError, Outcome, Progress

_LINE: Final = re.compile(r"^(some|full) avg10=\S+ avg60=(\S+) ", re.MULTILINE)
_WANTED: Final = {"cpu": "some", "memory": "full", "io": "full"}


def run(context: Context, progress: Progress) -> Outcome:
    """Read the shares of the last minute."""
    folder = Path(context.proc, "pressure")
    if not folder.is_dir():
        raise NotApplicableError("the kernel has no pressure stall information (CONFIG_PSI)")
    return Outcome(
        tuple(
            Measurement(f"{resource}_{kind}", parse((folder / resource).read_text(encoding="ascii"))[kind])
            for resource, kind in _WANTED.items()
        )
    )


def parse(text: str) -> dict[str, float]:
    """Share of the last 60 s, 0 to 1, in which some and in which all tasks were stalled."""
    return {kind: float(percent) / 100 for kind, percent in _LINE.findall(text)}


CHECK = Check(
    name="pressure",
    title="Pressure on processors, memory and disks",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "spare"), 1),
    measures=(
        Measure("cpu_some", "ratio", "time that tasks waited for a core", "lower", Bounds(warn=0.5), noise=99),
        Measure("memory_full", "ratio", "time lost to memory reclaim", "lower", Bounds(warn=0.02, fail=0.2), noise=99),
        Measure("io_full", "ratio", "time that everybody waited for disks", "lower", Bounds(warn=0.2), noise=99),
    ),
    advice="somebody else is working on this node; `ps aux --sort=-pcpu` and `iotop` name them",
)
