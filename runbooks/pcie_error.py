"""The PCI Express link of a device has errors that the hardware could not correct, or is gone."""

from __future__ import annotations

from collections.abc import Callable

from opsd.collectors.base import Event, RankFact
from opsd.runbooks.base import Cause, Culprit, View
from opsd.runbooks.lib.gpus import gpu_culprit
from opsd.runbooks.lib.kernel_faults import DAY_S, HOUR_S, Data, KernelFault, Row, has, kernel_runbook, lacks, matches
from opsd.runbooks.lib.ports import name, port_of
from opsd.runbooks.lib.signals import text
from opsd.runbooks.lib.xids import gpu_at

STORM = 1000
"""Corrected errors within an hour; each is repeated by the link and costs microseconds."""

TOGETHER_S = 5.0
"""The lines about one recovery come within this time: the devices below first, the port after its reset."""


def _fatal(data: Data) -> bool:
    return matches("severity", r"^\w+ \(Fatal\)$")(data) or "outcome" in data


ROWS = (
    Row("pcie_error", "a fatal PCIe error at {pci_bus_id} {outcome}", _fatal, "pci_bus_id", critical=True),
    Row("pcie_link_down", "the device in PCIe slot {slot} ({pci_bus_id}) is gone", about="pci_bus_id", critical=True),
    Row("pcie_error", "uncorrected PCIe errors at {pci_bus_id}", matches("severity", r"^\w+ \(Non-Fatal\)$"),
        "pci_bus_id", within_s=HOUR_S),
    Row("pcie_error", "a storm of corrected PCIe errors at {pci_bus_id}", has("severity", "Corrected", "Correctable"),
        "pci_bus_id", STORM, HOUR_S),
    Row("iommu_fault", "the IOMMU {device} has refused a device access to memory", lacks("pci_bus_id", "."), "device",
        within_s=HOUR_S),
    Row("iommu_fault", "the IOMMU has refused the device at {pci_bus_id} access to memory", about="pci_bus_id",
        within_s=HOUR_S),
)  # fmt: skip


def _elsewhere(view: View) -> Callable[[Event], bool]:
    """Faults of the IOMMU that are about neither a GPU nor a network port: USB controllers and boards have many.

    Arm's IOMMU names the device since Linux 6.15, in another line.
    """
    known = {gpu.pci_bus_id for gpu in view.gpus}
    known |= {series.labels["pci_bus_id"] for series in view.select("opsd_ib_port_info")}
    named = [event.at for event in view.events("iommu_fault", DAY_S) if "pci_bus_id" in event.data]

    def elsewhere(event: Event) -> bool:
        if event.kind != "iommu_fault":
            return False
        if "pci_bus_id" in event.data:
            return text(event.data, "pci_bus_id") not in known
        return "device" not in event.data or any(abs(event.at - at) <= TOGETHER_S for at in named)

    return elsewhere


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
    what = "IOMMU" if fault.row.about == "device" else "PCIe device"
    return Culprit("node", view.node, detail=f"{what} {fault.about}"), None


RUNBOOK = kernel_runbook(
    ROWS,
    advice=": have slot, riser and device checked",
    cost="ranks that use the device die or hang",
    culprit_of=_culprit,
    ignored=_elsewhere,
    causes=(Cause("gpu_lost", "gpu"), Cause("gpu_xid", "gpu")),
)
