"""The kernel's opinion of its own clock (adjtimex(2)), which boot of the machine it is, and its age."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Final, NamedTuple

_STA_UNSYNC: Final = 0x40
_STA_NANO: Final = 0x2000
_TIME_ERROR: Final = 5


class _Timex(ctypes.Structure):
    """``struct timex`` of linux/timex.h, 64 bit, as far as it is read here."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 168),
    )


class ClockState(NamedTuple):
    """Whether a service keeps the clock right, by how much it is off as far as that knows, and may be off at most."""

    synchronised: bool
    offset_s: float
    max_error_s: float


def read_clock() -> ClockState:
    """Ask the kernel. The two figures mean nothing while the clock is not synchronised."""
    timex = _Timex()
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    return ClockState(
        synchronised=state != _TIME_ERROR and not timex.status & _STA_UNSYNC,
        offset_s=timex.offset * (1e-9 if timex.status & _STA_NANO else 1e-6),
        max_error_s=timex.maxerror * 1e-6,
    )


def boot_id(proc: Path = Path("/proc")) -> str:
    """Identifies the boot. Raises OSError."""
    return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def uptime_s() -> float:
    """Seconds since the boot, those of suspension included, by a clock that nobody sets: CLOCK_BOOTTIME."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
