"""A network adapter has failed: its firmware does not answer, it sends nothing, or its queues have errors."""

from __future__ import annotations

from collections.abc import Callable, Collection

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Cause, Culprit, View
from opsd.runbooks.lib.kernel_faults import HOUR_S, Data, KernelFault, Row, kernel_runbook
from opsd.runbooks.lib.ports import dependent, name, port_of
from opsd.runbooks.lib.signals import text

DEAD = frozenset(
    {
        "device's health compromised",
        "health recovery flow aborted",
        "health recovery failed",
        "Fatal error detected",
        "handling bad device here",
        "starting health recovery flow",
        "timeout. Will cause a leak of a command resource",
        "unrecoverable hardware error",
        "pre-initializing",
        "probe failed",
        "device is not ready",
    }
)
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
    "nic_failed",
    ROWS,
    """
# A network adapter has failed

## Meaning
The driver of the adapter says that its firmware is in a fatal state, that recovering it began or failed, that a
command was never answered or not in time, that nothing was sent for many seconds (`TX timeout`, `Tx Unit Hang`, the
kernel's `NETDEV WATCHDOG`), or that a completion queue has an error. The last one may also come from a program that
does not read its queue, and is only a warning.

## Impact
Ranks that use the port fail with NCCL errors or hang until their time-out. With its management network on the same
adapter the node drops out altogether.

## Diagnosis
1. `opsd incidents show ID`: which adapter, what its driver said.
2. `journalctl -k --since -1hour | grep -iE "mlx5|bnxt|ice|ena|watchdog"`: what came first: heat, a PCIe
   error, a firmware assert.
3. `ibstat` and `cat /sys/class/infiniband/mlx5_0/ports/1/state`: whether the port is back.
4. Errors of completion queues only: which program used the port at that time?

## Mitigation
- Recovered by itself, once: note the firmware release, let the job go on.
- Not recovered, or again: take the node out, start it cold, update the firmware, then replace the adapter.

## What opsd does by itself
- observe: opens the incident; resolves it after a reboot, or an hour without such a message.
- recommend: the same, and notifies.
- act: unless only a completion queue has an error, a run on several nodes with a spare swaps this node for it, and
  the node is drained if policy.drain allows it.
""",
    component="network",
    advice=": start the node cold, then replace the adapter",
    cost="collectives over this adapter fail or hang",
    culprit_of=_culprit,
    causes=(Cause("pcie_error", "node"),),
)
