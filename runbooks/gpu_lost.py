"""A GPU no longer answers its driver: it fell off the bus, or the driver has given it up."""

from __future__ import annotations

from collections.abc import Iterator

from opsd.collectors.base import GpuFact
from opsd.runbooks.base import Cost, Evidence, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.gpus import gpu_culprit, gpu_of, job_evidence, xids_of
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import counted, text


def _finding(gpu: GpuFact, view: View) -> Finding:
    culprit, rank = gpu_culprit(view, gpu.index, gpu.lost or "")
    said = f"the driver says of GPU {gpu.index} ({gpu.pci_bus_id}): {gpu.lost}"
    xids = [
        Evidence(f"{xid.message} {view.wall - xid.at:.0f} s ago", text(xid.data, "source"), view.wall)
        for xid in xids_of(view, gpu, 60.0)[-3:]
    ]
    waiting = rank.world_size if rank else 1
    return Finding(
        kind="gpu_lost",
        key=gpu.uuid,
        severity=Severity.CRITICAL,
        summary=f"GPU {gpu.index} ({gpu.pci_bus_id}) is lost",
        culprit=culprit,
        confidence=0.98,
        evidence=(Evidence(said, "NVML", view.wall), job_evidence(view, rank), *xids),
        cost=Cost(1.0, 0.0, f"{counted(waiting, 'GPU')} cannot train while it is gone" if rank else "one GPU less"),
        job=rank.job if rank else "",
        data={"uuid": gpu.uuid, "gpu": gpu.index},
    )


def _detect(view: View) -> Iterator[Finding]:
    return (_finding(gpu, view) for gpu in view.gpus if gpu.lost is not None and gpu.uuid)


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the same GPU answers again. A GPU that is not listed at all is not known to be well."""
    gpu = gpu_of(view, text(incident.data, "uuid"))
    return None if gpu is None else gpu.lost is None


RUNBOOK = Runbook(
    kind="gpu_lost",
    first=("opsd drain NODE --incident ID --reason WHY",),
    detect=_detect,
    remedy=notify_node(": drain the node and reboot it; twice in a week is a case for the vendor", swap=True),
    healed=_healed,
    needs=("nvml",),
    open_after_s=1.0,
    clear_after_s=30.0,
    verify_s=600.0,
)
