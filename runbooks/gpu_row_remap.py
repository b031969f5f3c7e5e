"""The driver replaces bad memory of a GPU: the replacement of a row or page waits for a reset, or has failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opsd.runbooks.base import Action, Cause, Finding, Incident, Severity, View
from opsd.runbooks.lib.gpus import GpuRunbook, by_gpu, gpu_finding, newest, told
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import text
from opsd.runbooks.lib.xids import of_its_memory

FAILED = "DCGM_FI_DEV_ROW_REMAP_FAILURE"
ROWS, PAGES = "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "opsd_gpu_retired_pages"
FLAGS: Mapping[str, str] = {
    FAILED: "remapping a row of its memory has failed",
    "opsd_gpu_row_remap_pending": "a remapped row of its memory waits for a reset",
    "opsd_gpu_retired_pages_pending": "a retired page of its memory waits for a reset",
}
"""What each flag says, the worst first. GPUs before Ampere retire pages, later ones remap rows."""


def _detect(view: View) -> Iterator[Finding]:
    said: dict[str, str] = {}
    for flag in FLAGS:
        for uuid, value in newest(view, flag).items():
            if value:
                said.setdefault(uuid, flag)
    for gpu in view.gpus if said else ():
        if gpu.uuid in said:
            uuid, flag = gpu.uuid, said[gpu.uuid]
            what, rows = f"GPU {gpu.index}: {FLAGS[flag]}", newest(view, ROWS).get(uuid)
            pages = sum(series.last or 0.0 for series in by_gpu(view, PAGES).get(uuid, ()))
            remapped = f"{rows:.0f} rows were remapped after uncorrectable errors so far" if rows is not None else ""
            retired = f"{pages:.0f} pages were retired so far" if pages else ""
            facts = ((flag, what), (ROWS, remapped), (PAGES, retired))
            yield gpu_finding(
                view, uuid, gpu.index, what,
                (one for metric, fact in facts for one in told(view, uuid, metric, fact)),
                detail=FLAGS[flag], confidence=0.98, flag=flag,
                severity=Severity.CRITICAL if flag == FAILED else Severity.WARNING,
            )  # fmt: skip


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    failed = incident.severity is Severity.CRITICAL
    advice = "take the node out, the GPU has to be replaced" if failed else "reset the GPU when its job is over"
    return notify_node(f": {advice}", swap=failed)(incident, view)


def _healed(incident: Incident, view: View) -> bool | None:
    uuid, flag = text(incident.data, "uuid"), text(incident.data, "flag") or FAILED
    values = {flag: newest(view, flag).get(uuid) for flag in FLAGS}
    return None if values.get(flag) is None else not any(values.values())


RUNBOOK = GpuRunbook(
    detect=_detect,
    remedy=_remedy,
    healed=_healed,
    causes=(Cause("gpu_xid", "gpu", lag_s=60.0, fits=of_its_memory),),
    open_after_s=2.0,
    verify_s=3600.0,
)
