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
    ROWS,
    advice=": reboot the node before its next job",
    cost="the process was ended, and others hang on its locks",
    culprit_of=_culprit,
)
