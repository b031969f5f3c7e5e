"""A kernel module of NVIDIA does not work: a GPU that it cannot start, or GPUDirect RDMA without its module."""

from __future__ import annotations

from collections.abc import Iterator

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Cause, Culprit, Series, View
from opsd.runbooks.lib.gpus import gpu_culprit
from opsd.runbooks.lib.kernel_faults import (
    HOUR_S,
    KernelFault,
    Lasting,
    Row,
    has,
    kernel_runbook,
    lasting_fault,
    matches,
)

ROWS = (
    Row("gpu_init_failed", "the driver cannot start the GPU at {pci_bus_id} ({status})",
        about="pci_bus_id", critical=True),
    Row("gpu_firmware_silent", "the firmware of a GPU (number {instance} of the driver) does not answer: {cause}",
        matches("cause", "heartbeat"), critical=True),
    Row("gpu_firmware_silent", "a GPU (number {instance} of the driver) does not go on: {cause}",
        matches("cause", "locked"), within_s=HOUR_S),
    Row("gpu_driver_fatal", "the driver fails every new program until the node is rebooted: {cause}",
        has("asks", "os reboot"), critical=True),
    Row("gpu_driver_fatal", "a GPU waits for its reset: {cause}", has("asks", "Reset required"),
        within_s=HOUR_S, critical=True),
    Row("peermem_error", "nvidia-peermem does not fit the network driver: {cause}", matches("cause", "symbol")),
    Row("peermem_error", "nvidia-peermem has lost track of device memory: {cause}", matches("cause", "^invalid")),
)  # fmt: skip


ON_BUS, RELEASES = "opsd_host_gpu_on_bus_info", "opsd_host_gpu_driver_info"
LASTED_S = 120.0
"""The driver needs half a minute to start the GPUs of a node, and an upgrade replaces file after file."""

NOT_STARTED = Row("gpu_init_failed", "{what} {pci_bus_id}", critical=True, within_s=0.0)
REPLACED = Row(
    "gpu_driver_replaced", "the driver's library on the disk is of release {library}, its loaded module of {module}",
    critical=True, within_s=0.0, go_on=True,
)  # fmt: skip


def _lasting(view: View, seconds: float) -> Iterator[KernelFault]:
    """GPUs on the bus that the driver does not have, and a library that does not fit the loaded module."""
    loaded = False
    for series in _lasted(view, RELEASES, seconds):
        module, library = series.labels["module"], series.labels["library"]
        loaded = bool(module)
        if module and library and module != library:
            said = "every program that is started now fails with a version mismatch; those that run go on"
            yield lasting_fault(view, REPLACED, "library", said, "host", module=module, library=library)
    started = {gpu.pci_bus_id for gpu in view.gpus}
    for series in _lasted(view, ON_BUS, seconds):
        of = series.labels
        pci, driver, unbound = of["pci_bus_id"], of["driver"], not of["driver"] and (loaded or of["display"] == "no")
        if of["excluded"] == "no" and pci not in started and (unbound or (driver == "nvidia" and started)):
            what = "no kernel driver has the GPU at" if unbound else "the driver has not started the GPU at"
            said = f"{pci} is on the PCI bus, with the kernel driver {driver or 'none'}; the NVIDIA driver lists it not"
            yield lasting_fault(view, NOT_STARTED, pci, said, "host", pci_bus_id=pci, what=what)


def _lasted(view: View, metric: str, seconds: float) -> Iterator[Series]:
    """The series that have been there for so long, unchanged."""
    for series in view.select(metric):
        points = series.values(seconds)
        if series.last is not None and (not seconds or view.now - points[0][0] >= seconds - 5.0):
            yield series


def _culprit(view: View, fault: KernelFault) -> tuple[Culprit, RankFact | None]:
    """The GPU at this address if the node has ever seen it, else the node."""
    if fault.row is REPLACED:
        return Culprit("node", view.node, detail="driver library"), None
    gpu = next((gpu for gpu in view.gpus if fault.about and gpu.pci_bus_id == fault.about), None)
    if gpu is not None:
        return gpu_culprit(view, gpu.index, "cannot be started")
    return Culprit("node", view.node, detail=fault.about or "nvidia-peermem"), None


RUNBOOK = kernel_runbook(
    ROWS,
    advice=": start it cold, or install modules that fit each other",
    cost="jobs fail at their first CUDA call, or their collectives are slow",
    culprit_of=_culprit,
    lasting=Lasting("host", _lasting, LASTED_S),
    causes=(Cause("gpu_lost", "gpu"), Cause("gpu_xid", "gpu"), Cause("gpu_xid", "node")),
)
