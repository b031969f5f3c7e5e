"""A GPU no longer answers its driver: it fell off the bus, or the driver has given it up."""

from __future__ import annotations

from collections.abc import Iterator

from opsd.runbooks.base import Cost, Evidence, Finding, Incident, Severity, View
from opsd.runbooks.lib.gpus import GpuRunbook, gpu_finding, gpu_of, rank_on, xids_of
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import counted, said, text


def _detect(view: View) -> Iterator[Finding]:
    for gpu in view.gpus:
        if gpu.lost is None or not gpu.uuid:
            continue
        waiting = rank.world_size if (rank := rank_on(view, gpu.index)) else 0
        name = f"GPU {gpu.index} ({gpu.pci_bus_id})"
        xids = (
            Evidence(f"{xid.message} {view.wall - xid.at:.0f} s ago", text(xid.data, "source"), view.wall)
            for xid in xids_of(view, gpu, 60.0)[-3:]
        )
        yield gpu_finding(
            view, gpu.uuid, gpu.index, f"{name} is lost",
            (*said(view, "NVML", f"the driver says of {name}: {gpu.lost}"), *xids),
            detail=gpu.lost, confidence=0.98, severity=Severity.CRITICAL,
            cost=Cost(1.0, 0.0, f"{counted(waiting, 'GPU')} cannot train while it is gone" if rank else "one GPU less"),
        )  # fmt: skip


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the same GPU answers again. A GPU that is not listed at all is not known to be well."""
    gpu = gpu_of(view, text(incident.data, "uuid"))
    return None if gpu is None else gpu.lost is None


RUNBOOK = GpuRunbook(
    detect=_detect,
    remedy=notify_node(": drain the node and reboot it; twice in a week is a case for the vendor", swap=True),
    healed=_healed,
    open_after_s=1.0,
    clear_after_s=30.0,
    verify_s=600.0,
)
