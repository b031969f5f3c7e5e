"""A network adapter has failed: its firmware does not answer, it sends nothing, or its queues have errors."""

from __future__ import annotations

from collections.abc import Callable, Collection

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Cause, Culprit, View
from opsd.runbooks.lib.kernel_faults import HOUR_S, Data, KernelFault, Row, kernel_runbook
from opsd.runbooks.lib.ports import dependent, name, port_of
from opsd.runbooks.lib.signals import text

DEAD = frozenset({
    "device's health compromised", "health recovery flow aborted", "health recovery failed", "Fatal error detected",
    "handling bad device here", "starting health recovery flow", "timeout. Will cause a leak of a command resource",
    "unrecoverable hardware error", "pre-initializing", "probe failed", "device is not ready",
    "PCIe link lost", "Adapter removed",
})  # fmt: skip
SILENT = frozenset({"TX timeout detected", "Tx Unit Hang", "tx_timeout", "transmit queue"})
"""It sends nothing, in the words of several drivers and of the kernel's own watchdog."""

QUEUE = "CQ error"
UNANSWERED = frozenset({"didn't send a completion", "command timed out", "RX timeout"})
CAUSES = DEAD | SILENT | UNANSWERED | {QUEUE}
"""Messages of the adapter's driver when the adapter itself has failed; the rest is for ``nic_degrading``."""


def _rows(what: str, causes: Collection[str], *, critical: bool = False) -> tuple[Row, Row]:
    """The fault of an adapter that its driver names by its address, and of one that it names by its device."""

    def named(address: bool) -> Callable[[Data], bool]:
        return lambda data: text(data, "cause") in causes and ("pci_bus_id" in data) is address

    at, of = (f"the adapter {words} {what}" for words in ("at {pci_bus_id}", "of {device}"))
    return (
        Row("nic_error", at, named(True), "pci_bus_id", within_s=HOUR_S, critical=critical),
        Row("nic_error", of, named(False), "device", within_s=HOUR_S, critical=critical),
    )


ROWS = (
    *_rows("has failed: {cause}", DEAD, critical=True),
    *_rows("does not send", SILENT, critical=True),
    *_rows("has not answered its driver in time", UNANSWERED),
    *_rows("has an error in a completion queue (syndrome {status})", {QUEUE}),
)


def _culprit(view: View, fault: KernelFault) -> tuple[Culprit, RankFact | None]:
    """The port by its name, and a rank that needs the network."""
    about = {fault.row.about: fault.about}
    ports = [series.labels for series in view.select("opsd_ib_port_info", **about)] if fault.about else []
    detail = name(port_of(ports[0])) if ports else f"adapter {fault.about}"
    return Culprit("network", view.node, detail=detail), dependent(view)


RUNBOOK = kernel_runbook(
    ROWS,
    component="network",
    advice=": start the node cold, then replace the adapter",
    cost="collectives over this adapter fail or hang",
    culprit_of=_culprit,
    causes=(Cause("pcie_error", "node"),),
)
