"""The PCI Express link of a device has errors that the hardware could not correct, or is gone."""

from __future__ import annotations

from collections.abc import Callable
from re import compile

from opsd.collectors.base import Event, RankFact
from opsd.runbooks.base import Cause, Culprit, View
from opsd.runbooks.lib.gpus import gpu_culprit
from opsd.runbooks.lib.kernel_faults import DAY_S, HOUR_S, Data, KernelFault, Row, has, kernel_runbook
from opsd.runbooks.lib.ports import name, port_of
from opsd.runbooks.lib.signals import text
from opsd.runbooks.lib.xids import gpu_at

STORM = 1000
"""Corrected errors within an hour; each is repeated by the link and costs microseconds."""

TOGETHER_S = 5.0
"""The lines about one recovery come within this time: the devices below first, the port after its reset."""
_FATAL = compile(r"\w+ \(Fatal\)")
_NON_FATAL = compile(r"\w+ \(Non-Fatal\)")


def _fatal(data: Data) -> bool:
    return bool(_FATAL.fullmatch(text(data, "severity"))) or "outcome" in data


ROWS = (
    Row("pcie_error", "a fatal PCIe error at {pci_bus_id} {outcome}", _fatal, "pci_bus_id", critical=True),
    Row("pcie_link_down", "the device in PCIe slot {slot} ({pci_bus_id}) is gone", about="pci_bus_id", critical=True),
    Row(
        "pcie_error",
        "uncorrected PCIe errors at {pci_bus_id}",
        lambda data: bool(_NON_FATAL.fullmatch(text(data, "severity"))),
        "pci_bus_id",
        within_s=HOUR_S,
    ),
    Row(
        "pcie_error",
        "a storm of corrected PCIe errors at {pci_bus_id}",
        has("severity", "Corrected", "Correctable"),
        "pci_bus_id",
        STORM,
        HOUR_S,
    ),
    Row(
        "iommu_fault",
        "the IOMMU has refused the device at {pci_bus_id} access to memory",
        about="pci_bus_id",
        within_s=HOUR_S,
    ),
)


def _elsewhere(view: View) -> Callable[[Event], bool]:
    """Faults of the IOMMU that are about neither a GPU nor a network port: USB controllers and boards have many."""
    known = {gpu.pci_bus_id for gpu in view.gpus}
    known |= {series.labels["pci_bus_id"] for series in view.select("opsd_ib_port_info")}
    return lambda event: event.kind == "iommu_fault" and text(event.data, "pci_bus_id") not in known


def _culprit(view: View, fault: KernelFault) -> tuple[Culprit, RankFact | None]:
    """The GPU or network port at this address or, below a port that could not be recovered, without a way to recover.

    Otherwise the node with the address.
    """
    at = fault.events[-1].at
    below = (event for event in view.events("pcie_unrecoverable", DAY_S) if abs(event.at - at) <= TOGETHER_S)
    for address in (fault.about, *(text(event.data, "pci_bus_id") for event in below)):
        if (gpu := gpu_at(view, address)).index is not None:
            return gpu_culprit(view, gpu.index, "PCIe")
        for series in view.select("opsd_ib_port_info", pci_bus_id=address):
            return Culprit("network", view.node, detail=f"PCIe link of {name(port_of(series.labels))}"), None
    return Culprit("node", view.node, detail=f"PCIe device {fault.about}"), None


RUNBOOK = kernel_runbook(
    "pcie_error",
    ROWS,
    """
# A PCIe link has uncorrected errors

## Meaning
The kernel's error handler (AER, or DPC, which cuts the device off) has reported a fatal error, a recovery that
failed, a device whose link is down or that answers no read of its registers, uncorrected errors that are not fatal, or
a thousand corrected ones within an hour. Faults of the IOMMU (`DMAR`, `IO_PAGE_FAULT`) count for GPUs and network
ports. The incident names the GPU or the network port if the address is theirs;
otherwise it is a port of the board, and everything below it is affected. Single corrected errors are repeated by the
link and do not count.

## Impact
After a fatal error the device is reset or gone: its rank dies or hangs, an NVMe drive loses its file systems. What is
not fatal may have lost a transaction.

## Diagnosis
1. `opsd incidents show ID`: the address, and the device if it is known.
2. `journalctl -k --since -1hour | grep -iE "aer|dpc|pcieport|pciehp"`: which device reported first, which error.
3. `cat /sys/bus/pci/devices/0000:3b:00.0/aer_dev_fatal`: the counters of the device since boot.
4. `nvidia-smi --query-gpu=index,pci.bus_id,pcie.link.gen.current,pcie.link.width.current --format=csv`: GPUs and
   their links.
5. `ipmitool sel list`: the board's own record, with the slot.

## Mitigation
- Fatal, or recovery failed: take the node out; a cold start, then `opsd preflight`. Back again: riser, slot, device.
- Not fatal, or a storm of corrected ones: reseat card and riser at the next maintenance.

## What opsd does by itself
- observe: opens the incident; resolves it after a reboot, a day without a fatal error, an hour without others.
- recommend: the same, and notifies.
- act: for fatal errors a run on several nodes with a spare swaps this node for it, and the node is drained if
  policy.drain allows it.
""",
    advice=": have slot, riser and device checked",
    cost="ranks that use the device die or hang",
    culprit_of=_culprit,
    ignored=_elsewhere,
    causes=(Cause("gpu_lost", "gpu"), Cause("gpu_xid", "gpu")),
)
