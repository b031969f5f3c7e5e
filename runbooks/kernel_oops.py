"""The kernel has hit a fault of its own: an oops, a BUG, or a damaged page of memory."""

from __future__ import annotations

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Culprit, View
from opsd.runbooks.lib.kernel_faults import KernelFault, Row, kernel_runbook
from opsd.runbooks.lib.signals import integer

ROWS = (Row("kernel_oops", "the kernel has hit a fault of its own: {cause}", critical=True),)

DUMP_S = 2.0
"""The dump that names the process follows the first line of an oops within this time."""


def _culprit(view: View, fault: KernelFault) -> tuple[Culprit, RankFact | None]:
    """The node, with the rank that the dump names as its victim."""
    at = fault.events[-1].at
    pids = {integer(task.data, "pid") for task in view.events("kernel_task", 86_400.0) if abs(task.at - at) <= DUMP_S}
    return Culprit("node", view.node, detail="kernel"), next((rank for rank in view.ranks if rank.pid in pids), None)


RUNBOOK = kernel_runbook(
    "kernel_oops",
    ROWS,
    """
# The kernel has hit a fault of its own

## Meaning
The kernel has reported an oops (a NULL dereference, a page fault, a general protection fault), a `kernel BUG at`, or a
bad page. It has ended the process that ran at that moment. Locks that the process held in the kernel stay locked.
A crash of a program (`segfault`, `traps:`) is not such a fault.

## Impact
The job that owned the process fails. Later accesses to the same lock hang, often minutes or hours later, in other
processes. After a bad page, memory of the kernel may be damaged. The node needs a reboot before the next job.

## Diagnosis
1. `opsd incidents show ID`: the kernel's line.
2. `journalctl -k --since -1hour | grep -A 40 -E "BUG:|Oops|general protection"`: the process (`Comm:`), and the driver
   in the line `RIP:` and in the trace below it.
3. `cat /proc/sys/kernel/tainted`: whether modules from outside the kernel are loaded.
4. The same trace on several nodes points to a driver release. One node alone points to its memory.

## Mitigation
- Drain the node and reboot it: `opsd drain NODE --incident ID --reason WHY`, then `scontrol reboot ASAP NODE`.
- Again with the same trace: change the release of the driver that it names.
- Again with other traces: test the memory of the node.

## What opsd does by itself
- observe: opens the incident; resolves it after a reboot, or after a day without such a message.
- recommend: the same, and notifies.
- act: a run on several nodes with a spare swaps this node for it, and the node is drained if policy.drain allows it.
""",
    advice=": reboot the node before its next job",
    cost="the process was ended, and others hang on its locks",
    culprit_of=_culprit,
)
