"""Memory errors of a GPU: one that could not be corrected, or corrected ones in a burst."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opsd.runbooks.base import Action, Cause, Finding, Incident, Severity, View
from opsd.runbooks.lib.gpus import GpuRunbook, by_gpu, gpu_finding, gpu_of, newest, told
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import growth, number, text
from opsd.runbooks.lib.xids import of_its_memory

ERRORS = "opsd_gpu_ecc_errors_total"
SRAM, PENDING = "opsd_gpu_sram_threshold_exceeded", "opsd_gpu_row_remap_pending"
SHORT_S = 30.0
BURST_S, BURST = 60.0, 100.0
"""Single corrected errors are what ECC is for; this many in a minute come before an uncorrectable one."""

QUIET_S = 300.0


def _detect(view: View) -> Iterator[Finding]:
    for kind, seconds, least in (("uncorrected", SHORT_S, 1.0), ("corrected", BURST_S, BURST)):
        for series in view.select(ERRORS, type=kind, counter="volatile"):
            if series.last is not None and (errors := growth(series, seconds)) >= least:
                uuid, gpu, fatal = series.labels["UUID"], int(series.labels["gpu"]), kind == "uncorrected"
                since = f"in the last {seconds:.0f} s, {series.last:.0f} since the driver was loaded"
                pending = "a row remapping waits for a reset of the GPU" if newest(view, PENDING).get(uuid) else ""
                yield gpu_finding(
                    view, uuid, gpu, f"GPU {gpu} has {kind} memory errors",
                    told(view, uuid, ERRORS, f"{errors:.0f} {kind} ECC errors {since}", pending),
                    detail=f"{kind} memory errors", confidence=0.98 if fatal else 0.8, key=f"{uuid}/{kind}",
                    severity=Severity.CRITICAL if fatal else Severity.WARNING,
                    cost="the process that used the memory is killed by the driver" if fatal else "",
                    errors=kind, total=series.last,
                )  # fmt: skip
    yield from _sram(view)


def _sram(view: View) -> Iterator[Finding]:
    """The driver itself counts and judges these; it asks for a replacement of the GPU."""
    what = "uncorrected errors of its SRAM have passed the threshold for a replacement"
    for uuid, exceeded in newest(view, SRAM).items() if view.select(SRAM) else ():
        if exceeded and (gpu := gpu_of(view, uuid)) is not None:
            fact = f"GPU {gpu.index}: {what}"
            yield gpu_finding(
                view, uuid, gpu.index, fact, told(view, uuid, SRAM, fact), detail=what, confidence=0.98,
                severity=Severity.CRITICAL, key=f"{uuid}/sram", cost="the next such error ends the rank", errors="sram",
            )  # fmt: skip


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    if text(incident.data, "errors") == "sram":
        return notify_node(": have the GPU replaced", swap=True)(incident, view)
    advice = "reset it before it trains again" if incident.severity is Severity.CRITICAL else "plan its replacement"
    return notify_node(f": {advice}")(incident, view)


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
    waiting = newest(view, PENDING).get(uuid, 0.0)
    wanted = newest(view, "opsd_gpu_recovery_action").get(uuid, 0.0)
    points = found[0].values(QUIET_S)
    quiet = len(points) > 0.9 * QUIET_S and points[0][1] == points[-1][1]
    return quiet and not waiting and not wanted


RUNBOOK = GpuRunbook(
    detect=_detect,
    remedy=_remedy,
    healed=_healed,
    causes=(Cause("gpu_xid", "gpu", lag_s=60.0, fits=of_its_memory),),
    verify_s=900.0,
)
