"""Which boot of this machine it is, and for how long it has run."""

from __future__ import annotations

import time
from pathlib import Path


def boot_id(proc: Path = Path("/proc")) -> str:
    """Identifies the boot. Raises OSError."""
    return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def uptime_s() -> float:
    """Seconds since the boot, those of suspension included, by a clock that nobody sets: CLOCK_BOOTTIME."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
