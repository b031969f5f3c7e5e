"""Processors of the node are throttled because they are too hot."""

from __future__ import annotations

from opsd.runbooks.lib.kernel_faults import Row, kernel_runbook

WITHIN_S, APART_S = 900.0, 60.0
"""Kernels before 5.6 report any moment above the threshold, at most every five minutes for each processor."""

ROWS = (
    Row("cpu_throttled", "processors are throttled by heat", lambda data: data.get("lasting") is True,
        within_s=WITHIN_S),
    Row("cpu_throttled", "processors are throttled by heat again and again", lambda data: data.get("lasting") is False,
        at_least=2, within_s=WITHIN_S, apart_s=APART_S),
)  # fmt: skip

RUNBOOK = kernel_runbook(
    ROWS,
    advice=": have fans and heat sinks checked",
    cost="loaders and kernel launches are slower on all ranks of the node",
    first=("ipmitool sdr type Fan",),
)
