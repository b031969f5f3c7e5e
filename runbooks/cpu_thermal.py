"""Processors of the node are throttled because they are too hot."""

from __future__ import annotations

from opsd.runbooks.lib.kernel_faults import Row, kernel_runbook

WITHIN_S, APART_S = 900.0, 60.0
"""Kernels before 5.6 report any moment above the threshold, at most every five minutes for each processor."""

ROWS = (
    Row(
        "cpu_throttled", "processors are throttled by heat", lambda data: data.get("lasting") is True, within_s=WITHIN_S
    ),
    Row(
        "cpu_throttled",
        "processors are throttled by heat again and again",
        lambda data: data.get("lasting") is False,
        at_least=2,
        within_s=WITHIN_S,
        apart_s=APART_S,
    ),
)

RUNBOOK = kernel_runbook(
    "cpu_thermal",
    ROWS,
    """
# Processors are throttled by heat

## Meaning
The kernel has reported processors above their temperature threshold: once, if the kernel (5.6 and later) only writes
it for a rise that lasts some seconds, or again after a minute and more. One single moment does not count.

## Impact
Loaders and the launch of kernels become slower, on every rank of the node; a synchronous job runs at their speed. The
same air cools the GPUs in many servers, so that they may be next.

## Diagnosis
1. `opsd incidents show ID`: which processors, how often.
2. `ipmitool sdr type Temperature` and `ipmitool sdr type Fan`: inlet air, fans below their neighbours.
3. `journalctl -k --since -1hour | grep -i temperature`: all processors of a socket: its heat sink; both sockets: air.
4. `nvidia-smi --query-gpu=index,temperature.gpu --format=csv`: whether GPUs are hot as well.

## Mitigation
- Fans, filters and blanks of the chassis; with liquid cooling, flow and pressure of the loop.
- One socket only: its heat sink or thermal paste.

## What opsd does by itself
- observe: opens the incident; resolves it after 15 minutes without such a message, or a reboot.
- recommend, act: the same, and notifies.
""",
    advice=": have fans and heat sinks checked",
    cost="loaders and kernel launches are slower on all ranks of the node",
    first=("ipmitool sdr type Fan",),
)
