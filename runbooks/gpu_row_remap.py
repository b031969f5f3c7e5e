"""The driver replaces bad memory of a GPU: the replacement of a row or page waits for a reset, or has failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opsd.runbooks.base import Action, Cause, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.gpus import by_gpu, gpu_culprit, job_evidence, newest, told
from opsd.runbooks.lib.remedies import swap_out
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
            yield _finding(view, gpu.uuid, gpu.index, said[gpu.uuid])


def _finding(view: View, uuid: str, gpu: int, flag: str) -> Finding:
    what = FLAGS[flag]
    culprit, rank = gpu_culprit(view, gpu, what)
    rows, pages = newest(view, ROWS).get(uuid), sum(series.last or 0.0 for series in by_gpu(view, PAGES).get(uuid, ()))
    remapped = f"{rows:.0f} rows were remapped after uncorrectable errors so far" if rows is not None else ""
    retired = f"{pages:.0f} pages were retired so far" if pages else ""
    return Finding(
        kind="gpu_row_remap",
        key=uuid,
        severity=Severity.CRITICAL if flag == FAILED else Severity.WARNING,
        summary=f"GPU {gpu}: {what}",
        culprit=culprit,
        confidence=0.98,
        evidence=(
            *told(view, uuid, flag, f"GPU {gpu}: {what}"),
            *told(view, uuid, ROWS, remapped),
            *told(view, uuid, PAGES, retired),
            job_evidence(view, rank),
        ),
        job=rank.job if rank else "",
        data={"uuid": uuid, "gpu": gpu, "flag": flag},
    )


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    failed = incident.severity is Severity.CRITICAL
    advice = "take the node out, the GPU has to be replaced" if failed else "reset the GPU when its job is over"
    notice = Action("notify", target=view.node, reason=f"{incident.summary}: {advice}")
    return (*swap_out(incident, view), notice) if failed else (notice,)


def _healed(incident: Incident, view: View) -> bool | None:
    uuid, flag = text(incident.data, "uuid"), text(incident.data, "flag") or FAILED
    values = {flag: newest(view, flag).get(uuid) for flag in FLAGS}
    return None if values.get(flag) is None else not any(values.values())


RUNBOOK = Runbook(
    kind="gpu_row_remap",
    first=("opsd drain NODE --incident ID --reason WHY",),
    detect=_detect,
    remedy=_remedy,
    healed=_healed,
    needs=("nvml",),
    causes=(Cause("gpu_xid", "gpu", lag_s=60.0, fits=of_its_memory),),
    open_after_s=2.0,
    verify_s=3600.0,
)
