"""Huge pages: transparent ones must not stall the ranks; reserved ones must not be unused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from opsd.preflight.base import Check, Context, Finding, Measure, Measurement, Outcome, Progress, Verdict

_IDLE_SHARE: Final = 0.05


def run(context: Context, progress: Progress) -> Outcome:
    """Read the kernel's settings and /proc/meminfo."""
    folder = Path(context.sys, "kernel/mm/transparent_hugepage")
    modes = {
        name: selected(path.read_text(encoding="ascii"))
        for name in ("enabled", "defrag")
        if (path := folder / name).exists()
    }
    meminfo = parse_meminfo(Path(context.proc, "meminfo").read_text(encoding="ascii"))
    idle = meminfo.get("HugePages_Free", 0) * meminfo.get("Hugepagesize", 0)
    facts = {f"transparent huge pages, {name}": mode for name, mode in modes.items()}
    findings = tuple(_judge(modes, idle, meminfo["MemTotal"]))
    return Outcome((Measurement("reserved_idle", idle),), findings, facts)


def selected(text: str) -> str:
    """The choice in brackets of a sysfs file such as "always [madvise] never"."""
    match = re.search(r"\[(\w[\w+]*)\]", text)
    return match[1] if match else text.strip()


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo with sizes in bytes and counts as they are."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        values[name] = int(number) << (10 if unit else 0)
    return values


def _judge(modes: dict[str, str], idle: int, total: int) -> Iterator[Finding]:
    if modes.get("enabled") == "never":
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding(Verdict.WARN, "transparent huge pages are off, pinned buffers cost more page-table walks", advice)
    if modes.get("defrag") == "always":
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/defrag"
        yield Finding(Verdict.WARN, "every page fault may stall to compact memory (defrag is always)", advice)
    if idle > total * _IDLE_SHARE:
        summary = f"{idle / 2**30:.1f} GiB of memory are reserved as huge pages and not used"
        yield Finding(Verdict.WARN, summary, "sysctl -w vm.nr_hugepages=0 unless something needs them")


CHECK = Check(
    name="hugepages",
    title="Huge pages",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "burn-in", "spare"), 1),
    measures=(Measure("reserved_idle", "bytes", "huge pages reserved and not used"),),
    stable=True,
)
