"""The kernel says that a processor or a task does not go on: soft and hard lockups, RCU stalls, hung tasks."""

from __future__ import annotations

from collections.abc import Callable

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Cause, Culprit, View
from opsd.runbooks.lib.kernel_faults import HOUR_S, Data, KernelFault, Row, has, kernel_runbook
from opsd.runbooks.lib.signals import integer, text

LONG_S = 60
"""A soft lockup that lasts this long does not end by itself any more."""

QUIET_S = 600.0


def _soft(*, long: bool) -> Callable[[Data], bool]:
    return lambda data: text(data, "lockup") == "soft" and (integer(data, "seconds") >= LONG_S) is long


ROWS = (
    Row("cpu_lockup", "processor {cpu} is locked up with interrupts off", has("lockup", "hard"),
        within_s=HOUR_S, critical=True),
    Row("cpu_lockup", "processor {cpu} has been stuck in the kernel for {seconds} s", _soft(long=True),
        within_s=HOUR_S, critical=True),
    Row("cpu_lockup", "processor {cpu} is stuck in the kernel", _soft(long=False), within_s=QUIET_S),
    Row("cpu_lockup", "a processor has stalled", has("lockup", "rcu"), within_s=QUIET_S),
    Row("hung_task", "{process} (pid {pid}) has been waiting in the kernel for {seconds} s", within_s=QUIET_S),
)  # fmt: skip


def _culprit(view: View, fault: KernelFault) -> tuple[Culprit, RankFact | None]:
    """The rank whose process it is, else the node."""
    pids = {integer(event.data, "pid") for event in fault.events}
    rank = next((fact for fact in view.ranks if fact.pid in pids), None)
    if rank is not None:
        return Culprit("rank", view.node, rank.gpu, rank.rank, "waits in the kernel"), rank
    return Culprit("node", view.node, detail="kernel"), None


RUNBOOK = kernel_runbook(
    ROWS,
    advice=": read the stack below the message in the kernel log",
    cost="every rank of the job waits for what is stuck",
    culprit_of=_culprit,
    causes=(Cause("driver_hang", "node"), Cause("storage_slow", "node"), Cause("disk_errors", "node")),
    first=("journalctl -k --since -1hour",),
)
