"""The kernel has given up the fast clock of the processors, which slows every program that asks for the time."""

from __future__ import annotations

from opsd.runbooks.lib.kernel_faults import Row, kernel_runbook
from opsd.runbooks.lib.signals import text

ROWS = (Row("clock_unstable", "the clock source {device} is unstable", lambda data: text(data, "device") == "tsc"),)

RUNBOOK = kernel_runbook(
    ROWS, advice=": the node is slow until it is booted again", cost="every read of the time is slow"
)
