"""The kernel has given up the fast clock of the processors, which slows every program that asks for the time."""

from __future__ import annotations

from opsd.runbooks.lib.kernel_faults import Row, kernel_runbook
from opsd.runbooks.lib.signals import text

ROWS = (Row("clock_unstable", "the clock source {device} is unstable", lambda data: text(data, "device") == "tsc"),)

RUNBOOK = kernel_runbook(
    "clock_unstable",
    ROWS,
    """
# The clock source of the node is unstable

## Meaning
The kernel's watchdog has compared the processors' time stamp counter (`tsc`) with another clock and has marked it as
unstable. The kernel then reads the time from a slow device (`hpet`, `acpi_pm`). The early counter of the boot
(`tsc-early`) does not count.

## Impact
A read of the time takes microseconds instead of nanoseconds, and processors wait for each other. Ranks on this node
become stragglers, because CUDA, NCCL and Python ask for the time often.

## Diagnosis
1. `opsd incidents show ID`: the kernel's line.
2. `cat /sys/devices/system/clocksource/clocksource0/current_clocksource`: `tsc` is fast, `hpet` and `acpi_pm` are slow.
3. `journalctl -k | grep -iE "clocksource|tsc"`: the skew that the kernel has measured.
4. `opsd top`: whether ranks of this node are slower than others.

## Mitigation
- Reboot the node at the next chance; the kernel then tries the counter again.
- Again on the same node: update its firmware, or have the board checked.
- On all nodes with many sockets: a newer kernel, whose watchdog allows for long reads.

## What opsd does by itself
- observe: opens the incident; resolves it after a reboot, or after a day without such a message.
- recommend, act: the same, and notifies.
""",
    advice=": the node is slow until it is booted again",
    cost="every read of the time is slow",
)
