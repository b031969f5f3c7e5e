"""The driver replaces a bad row of GPU memory: the replacement waits for a reset, or has failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opsd.runbooks.base import Action, Cause, Finding, Guide, Incident, Runbook, Severity, View
from opsd.runbooks.lib.gpus import gpu_culprit, job_evidence, newest, told
from opsd.runbooks.lib.remedies import swap_out
from opsd.runbooks.lib.signals import text
from opsd.runbooks.lib.xids import of_its_memory

PENDING = "opsd_gpu_row_remap_pending"
FAILED = "DCGM_FI_DEV_ROW_REMAP_FAILURE"
ROWS = "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"


def _detect(view: View) -> Iterator[Finding]:
    failed = {uuid for uuid, value in newest(view, FAILED).items() if value}
    pending = {uuid for uuid, value in newest(view, PENDING).items() if value}
    if failed or pending:
        rows = newest(view, ROWS)
        indexes = {gpu.uuid: gpu.index for gpu in view.gpus}
        for uuid in sorted((failed | pending) & indexes.keys()):
            yield _finding(view, uuid, indexes[uuid], uuid in failed, rows.get(uuid))


def _finding(view: View, uuid: str, gpu: int, failed: bool, rows: float | None) -> Finding:
    what = "remapping a row of its memory has failed" if failed else "a remapped row of its memory waits for a reset"
    culprit, rank = gpu_culprit(view, gpu, what)
    remapped = f"{rows:.0f} rows were remapped after uncorrectable errors so far" if rows is not None else ""
    return Finding(
        kind="gpu_row_remap",
        key=uuid,
        severity=Severity.CRITICAL if failed else Severity.WARNING,
        summary=f"GPU {gpu}: {what}",
        culprit=culprit,
        confidence=0.98,
        evidence=(
            *told(view, uuid, FAILED if failed else PENDING, f"GPU {gpu}: {what}"),
            *told(view, uuid, ROWS, remapped),
            job_evidence(view, rank),
        ),
        job=rank.job if rank else "",
        data={"uuid": uuid, "gpu": gpu},
    )


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    failed = incident.severity is Severity.CRITICAL
    advice = "take the node out, the GPU has to be replaced" if failed else "reset the GPU when its job is over"
    notice = Action("notify", target=view.node, reason=f"{incident.summary}: {advice}")
    return (*swap_out(incident, view), notice) if failed else (notice,)


def _healed(incident: Incident, view: View) -> bool | None:
    uuid = text(incident.data, "uuid")
    pending, failed = newest(view, PENDING).get(uuid), newest(view, FAILED).get(uuid)
    return None if pending is None or failed is None else not pending and not failed


RUNBOOK = Runbook(
    kind="gpu_row_remap",
    guide=Guide.parse("""
# A row of GPU memory is being replaced

## Meaning
After memory errors the GPU replaces the bad row by a spare one. Pending: the remap takes effect at the next reset;
until then errors may come back. Failed: no spare row is left in that bank, and the GPU must be replaced.

## Impact
Pending: none now, but the next error in the same row may end the rank. Failed: do not train on it.

## Diagnosis
1. `opsd incidents show ID`: pending or failed, and how many rows were replaced before.
2. `nvidia-smi -q -d ROW_REMAPPER -i GPU`: pending, failure, and the histogram of banks with spare rows left.
3. `journalctl -k --since -1day | grep -iE "xid.*: (63|64)"`: 63 is a remapping recorded, 64 one that failed.

## Mitigation
- Pending: when the job has ended, `nvidia-smi -r -i GPU`, or reboot the node.
- Failed: `opsd drain NODE --incident ID --reason WHY`, and replace the GPU.

## What opsd does by itself
- observe: opens the incident, resolves it when neither flag is set any more.
- recommend: the same, and notifies.
- act: if the remapping failed, a run on several nodes with a spare swaps this node for it at a step boundary, and the
  node is drained if policy.drain allows it. It does not reset GPUs.
"""),
    first=("opsd drain NODE --incident ID --reason WHY",),
    detect=_detect,
    remedy=_remedy,
    healed=_healed,
    needs=("nvml",),
    causes=(Cause("gpu_xid", "gpu", lag_s=60.0, fits=of_its_memory),),
    open_after_s=2.0,
    verify_s=3600.0,
)
