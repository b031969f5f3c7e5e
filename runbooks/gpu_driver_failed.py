"""A kernel module of NVIDIA does not work: a GPU that it cannot start, or GPUDirect RDMA without its module."""

from __future__ import annotations

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Cause, Culprit, View
from opsd.runbooks.lib.gpus import gpu_culprit
from opsd.runbooks.lib.kernel_faults import HOUR_S, Fault, Row, kernel_runbook
from opsd.runbooks.lib.signals import text

ROWS = (
    Row(
        "gpu_init_failed",
        "the driver cannot start the GPU at {pci_bus_id} ({status})",
        about="pci_bus_id",
        critical=True,
    ),
    Row(
        "gpu_firmware_silent",
        "the firmware of a GPU (number {instance} of the driver) does not answer: {cause}",
        lambda data: "heartbeat" in text(data, "cause"),
        critical=True,
    ),
    Row(
        "gpu_firmware_silent",
        "a GPU (number {instance} of the driver) does not go on: {cause}",
        lambda data: "locked" in text(data, "cause"),
        within_s=HOUR_S,
    ),
    Row(
        "peermem_error",
        "nvidia-peermem does not fit the network driver: {cause}",
        lambda data: "symbol" in text(data, "cause"),
    ),
    Row(
        "peermem_error",
        "nvidia-peermem has lost track of device memory: {cause}",
        lambda data: text(data, "cause").startswith("invalid"),
    ),
)


def _culprit(view: View, fault: Fault) -> tuple[Culprit, RankFact | None]:
    """The GPU at this address if the node has ever seen it, else the node."""
    gpu = next((gpu for gpu in view.gpus if fault.about and gpu.pci_bus_id == fault.about), None)
    if gpu is not None:
        return gpu_culprit(view, gpu.index, "cannot be started")
    return Culprit("node", view.node, detail=fault.about or "nvidia-peermem"), None


RUNBOOK = kernel_runbook(
    "gpu_driver_failed",
    ROWS,
    """
# The NVIDIA driver cannot start a GPU, or GPUDirect RDMA

## Meaning
`RmInitAdapter failed` or a probe that failed: the driver is loaded and cannot start this GPU. Or the GPU's firmware
(GSP) no longer answers the driver, or the driver's watchdog says that a GPU is locked, without an Xid. Or the module
`nvidia-peermem` does not load beside the present network driver (a symbol of another version), or reports an invalid
context. A mismatch of a client's library with the driver (`API mismatch`) is no incident, as any container can cause
it.

## Impact
The GPU is missing, and jobs that ask for it fail at their first CUDA call. Without `nvidia-peermem`, and where NCCL
does not use DMA-BUF instead, collectives between nodes pass through main memory and are several times slower; after
an invalid context a buffer may not have been released.

## Diagnosis
1. `opsd incidents show ID`: which GPU with which status, or which symbol.
2. `journalctl -k --since -1day | grep -E "NVRM|nvidia|peermem"`: the lines before it say more: GSP firmware, an
   invalid BAR, a GPU that this release does not support.
3. `nvidia-smi -L` and `ls /proc/driver/nvidia/gpus`: which GPUs the driver has started, and which it knows.
4. `grep -c ib_register_peer_memory_client /proc/kallsyms`: 0 without a network driver that has the interface.

## Mitigation
- A GPU: a cold start (power off, not only a reboot), then reseat it, then replace it. All GPUs at once: the wrong
  driver release, its firmware files, or nouveau was loaded first.
- A symbol of another version: rebuild the NVIDIA modules after the network driver, or set NCCL to DMA-BUF.
- An invalid context: a newer driver; end jobs before you restart its services.

## What opsd does by itself
- observe: opens the incident; resolves it after a reboot, or after a day without such a message.
- recommend: the same, and notifies.
- act: for a GPU, a run on several nodes with a spare swaps this node for it, and the node is drained if policy.drain
  allows it.
""",
    advice=": start it cold, or install modules that fit each other",
    cost="jobs fail at their first CUDA call, or their collectives are slow",
    culprit_of=_culprit,
    causes=(Cause("gpu_lost", "gpu"), Cause("gpu_xid", "gpu"), Cause("gpu_xid", "node")),
)
