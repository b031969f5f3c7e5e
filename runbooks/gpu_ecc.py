"""Memory errors of a GPU: one that could not be corrected, or corrected ones in a burst."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opsd.collectors.base import GpuFact
from opsd.runbooks.base import Action, Cause, Cost, Finding, Incident, Runbook, Series, Severity, View
from opsd.runbooks.lib.gpus import by_gpu, gpu_culprit, gpu_of, job_evidence, newest, told
from opsd.runbooks.lib.remedies import swap_out
from opsd.runbooks.lib.signals import growth, number, text
from opsd.runbooks.lib.xids import of_its_memory

ERRORS = "opsd_gpu_ecc_errors_total"
SRAM = "opsd_gpu_sram_threshold_exceeded"
SHORT_S = 30.0
BURST_S, BURST = 60.0, 100.0
"""Single corrected errors are what ECC is for; this many in a minute come before an uncorrectable one."""

QUIET_S = 300.0


def _finding(view: View, series: Series, kind: str, errors: float, seconds: float) -> Finding:
    uuid, gpu = series.labels["UUID"], int(series.labels["gpu"])
    culprit, rank = gpu_culprit(view, gpu, f"{kind} memory errors")
    fatal = kind == "uncorrected"
    total, pending = series.last, newest(view, "opsd_gpu_row_remap_pending").get(uuid)
    facts = [
        f"{errors:.0f} {kind} ECC errors in the last {seconds:.0f} s, {total:.0f} since the driver was loaded",
        "a row remapping waits for a reset of the GPU" if pending else "",
    ]
    return Finding(
        kind="gpu_ecc",
        key=f"{uuid}/{kind}",
        severity=Severity.CRITICAL if fatal else Severity.WARNING,
        summary=f"GPU {gpu} has {kind} memory errors",
        culprit=culprit,
        confidence=0.98 if fatal else 0.8,
        evidence=(*told(view, uuid, ERRORS, *facts), job_evidence(view, rank)),
        cost=Cost(text="the process that used the memory is killed by the driver" if fatal else ""),
        job=rank.job if rank else "",
        data={"uuid": uuid, "gpu": gpu, "errors": kind, "total": total},
    )


def _detect(view: View) -> Iterator[Finding]:
    for kind, seconds, least in (("uncorrected", SHORT_S, 1.0), ("corrected", BURST_S, BURST)):
        for series in view.select(ERRORS, type=kind, counter="volatile"):
            if series.last is not None and (errors := growth(series, seconds)) >= least:
                yield _finding(view, series, kind, errors, seconds)
    for uuid, exceeded in newest(view, SRAM).items() if view.select(SRAM) else ():
        if exceeded and (gpu := gpu_of(view, uuid)) is not None:
            yield _sram_finding(view, gpu)


def _sram_finding(view: View, gpu: GpuFact) -> Finding:
    """The driver itself counts and judges these; it asks for a replacement of the GPU."""
    what = "uncorrected errors of its SRAM have passed the threshold for a replacement"
    culprit, rank = gpu_culprit(view, gpu.index, what)
    return Finding(
        kind="gpu_ecc",
        key=f"{gpu.uuid}/sram",
        severity=Severity.CRITICAL,
        summary=f"GPU {gpu.index}: {what}",
        culprit=culprit,
        confidence=0.98,
        evidence=(*told(view, gpu.uuid, SRAM, f"GPU {gpu.index}: {what}"), job_evidence(view, rank)),
        cost=Cost(text="the next such error ends the rank"),
        job=rank.job if rank else "",
        data={"uuid": gpu.uuid, "gpu": gpu.index, "errors": "sram"},
    )


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    if text(incident.data, "errors") == "sram":
        notice = Action("notify", target=view.node, reason=f"{incident.summary}: have the GPU replaced")
        return (*swap_out(incident, view), notice)
    advice = "reset it before it trains again" if incident.severity is Severity.CRITICAL else "plan its replacement"
    return (Action("notify", target=view.node, reason=f"{incident.summary}: {advice}"),)


def _healed(incident: Incident, view: View) -> bool | None:
    """True after a reset of the GPU (its counter restarts at 0), or after minutes without errors or pending remaps."""
    data = incident.data
    uuid = text(data, "uuid")
    if text(data, "errors") == "sram":
        exceeded = newest(view, SRAM).get(uuid)
        return None if exceeded is None else not exceeded
    found = by_gpu(view, ERRORS, type=text(data, "errors"), counter="volatile").get(uuid)
    if not found or (total := found[0].last) is None:
        return None
    if total < (number(data, "total") or 0.0):
        return True
    waiting = newest(view, "opsd_gpu_row_remap_pending").get(uuid, 0.0)
    wanted = newest(view, "opsd_gpu_recovery_action").get(uuid, 0.0)
    points = found[0].values(QUIET_S)
    quiet = len(points) > 0.9 * QUIET_S and points[0][1] == points[-1][1]
    return quiet and not waiting and not wanted


RUNBOOK = Runbook(
    kind="gpu_ecc",
    first=("opsd drain NODE --incident ID --reason WHY",),
    detect=_detect,
    remedy=_remedy,
    healed=_healed,
    needs=("nvml",),
    causes=(Cause("gpu_xid", "gpu", lag_s=60.0, fits=of_its_memory),),
    verify_s=900.0,
)
