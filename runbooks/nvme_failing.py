"""An NVMe drive warns, loses data, or will be worn out before a month-long run has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opsd.runbooks.base import Cost, Culprit, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import live_ranks
from opsd.runbooks.lib.signals import growth, latest, said, text

WEAR, WRITTEN = "opsd_storage_nvme_wear_ratio", "opsd_storage_nvme_written_bytes_total"
POWER_ON, INFO = "opsd_storage_nvme_power_on_seconds_total", "opsd_storage_nvme_info"
WARNING, MEDIA_ERRORS = "opsd_storage_nvme_critical_warning", "opsd_storage_nvme_media_errors_total"
LIVE, OVERHEATED = "opsd_storage_nvme_live", "opsd_storage_nvme_overheated_seconds_total"
SPARE, SPARE_LIMIT = "opsd_storage_nvme_available_spare_ratio", "opsd_storage_nvme_available_spare_threshold_ratio"

WINDOW_S = 600.0
DAY_S = 86_400.0
HORIZON_DAYS = 30.0
"""The end of its endurance is predicted for the next month: as long as a run takes."""

LASTING_S = 3 * 3600.0
"""How long a pace must last that is faster than that of the drive's life: checkpoints and the staging of data end."""

RESET_S = 150.0
"""Longer than the kernel needs to reset a controller, also if two questions to the drive meet resets."""

LEAST_WEAR = 0.2
"""Drives tell wear in whole percent: below this its pace is not known well enough."""

MEANINGS = {
    "spare_low": "its spare blocks run out",
    "temperature": "it is too hot",
    "reliability": "it has become unreliable",
    "read_only": "it can only be read any more",
    "backup_failed": "its power-loss protection has failed",
    "pmr_unreliable": "its persistent memory has failed",
}
GRAVE = frozenset({"reliability", "read_only"})


@dataclass(frozen=True, slots=True)
class _Fault:
    what: str
    grave: bool = False
    confidence: float = 0.95
    lasting_s: float = 0.0


def days_left(wear: float, written: float, powered_s: float, bytes_per_s: float) -> float | None:
    """Days until ``wear`` is 1, at the pace of its life or of the ``bytes_per_s`` of now, whichever wears it faster.

    The wear per byte is taken from the drive's own history, its write amplification included. None if it has none yet.
    """
    if wear <= 0 or written <= 0 or powered_s <= 0:
        return None
    pace = max(wear / powered_s, wear / written * bytes_per_s)
    return max(1.0 - wear, 0.0) / pace / DAY_S if pace > 0 else None


def _warnings(view: View, controller: str) -> Iterator[_Fault]:
    for series in view.select(WARNING, controller=controller):
        values = [value for _, value in series.values(WINDOW_S)][-2:]
        if series.last and min(values) > 0:
            warning = series.labels["warning"]
            yield _Fault(MEANINGS.get(warning, warning), warning in GRAVE)


def _dead(view: View, controller: str) -> Iterator[_Fault]:
    if latest(view, LIVE, controller=controller) == 0:
        yield _Fault("the kernel cannot use its controller", grave=True, lasting_s=RESET_S)


def _media_errors(view: View, controller: str) -> Iterator[_Fault]:
    for series in view.select(MEDIA_ERRORS, controller=controller):
        if series.last is not None and (errors := growth(series, WINDOW_S)) >= 1:
            yield _Fault(f"{errors:.0f} times in ten minutes data could not be read back", grave=True)


def _worn(view: View, controller: str) -> Iterator[_Fault]:
    wear, powered = (latest(view, metric, controller=controller) for metric in (WEAR, POWER_ON))
    for series in view.select(WRITTEN, controller=controller):
        points = series.values(WINDOW_S)
        if wear is None or wear < LEAST_WEAR or powered is None or series.last is None or len(points) < 2:
            return
        rate = growth(series, WINDOW_S) / (points[-1][0] - points[0][0])
        days = days_left(wear, series.last, powered, rate)
        if days is not None and days <= HORIZON_DAYS:
            when = f"will be in {days:.0f} days at {rate / 1e9:.2f} GB/s" if days >= 1 else "are about to be"
            always = days_left(wear, series.last, powered, 0.0)
            lasting_s = LASTING_S if always is None or always > HORIZON_DAYS else 0.0
            yield _Fault(f"{wear:.0%} of its endurance are used up, all of it {when}", False, 0.7, lasting_s)


def _faults(view: View, controller: str) -> list[_Fault]:
    return [fault for find in (_warnings, _dead, _media_errors, _worn) for fault in find(view, controller)]


def _detect(view: View) -> Iterator[Finding]:
    for controller in sorted({series.labels["controller"] for series in view.select(INFO)}):
        if faults := _faults(view, controller):
            yield _finding(view, controller, faults)


def _beside(view: View, controller: str) -> Iterator[str]:
    """What its SMART log says besides: spare blocks and heat."""
    spare, limit = (latest(view, metric, controller=controller) for metric in (SPARE, SPARE_LIMIT))
    if spare is not None and limit is not None:
        yield f"{spare:.0%} of its spare blocks are left; it warns below {limit:.0%}"
    if hot := sum(series.last or 0.0 for series in view.select(OVERHEATED, controller=controller)):
        yield f"it was hotter than its limits for {hot / 60:.0f} minutes of its life"


def _finding(view: View, controller: str, faults: Sequence[_Fault]) -> Finding:
    drive = next(series.labels for series in view.select(INFO, controller=controller))
    ranks, what = live_ranks(view), [fault.what for fault in faults]
    model = f"{drive['model']}, serial number {drive['serial']}"
    return Finding(
        key=f"{view.node}/{controller}/{drive['serial']}",
        severity=Severity.CRITICAL if any(fault.grave for fault in faults) else Severity.WARNING,
        summary=f"{controller} on {view.node}: {' and '.join(what)}",
        culprit=Culprit("storage", view.node, detail=controller),
        confidence=max(fault.confidence for fault in faults),
        evidence=said(view, "SMART log", *what, model, *_beside(view, controller)),
        cost=Cost(text="staged data and checkpoints on it are lost with it" if ranks else ""),
        job=ranks[0].job if ranks else "",
        data={"controller": controller, "serial": drive["serial"]},
        lasting_s=min(fault.lasting_s for fault in faults),
    )


def _healed(incident: Incident, view: View) -> bool | None:
    """True once another drive is in its place, or it shows nothing any more; None if it does not answer."""
    controller = text(incident.data, "controller")
    drives = [series.labels for series in view.select(INFO, controller=controller) if series.last is not None]
    if not drives:
        return None
    return all(drive["serial"] != text(incident.data, "serial") for drive in drives) or not _faults(view, controller)


RUNBOOK = Runbook(
    detect=_detect,
    remedy=notify_node(": move checkpoints elsewhere and have the drive replaced"),
    healed=_healed,
    needs=("nvme",),
    look_every_s=5.0,
    clear_after_s=60.0,
    verify_s=3600.0,
    prediction=True,
)
