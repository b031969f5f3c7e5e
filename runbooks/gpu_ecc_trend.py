"""A GPU corrects more memory errors from minute to minute: a burst, or one that cannot be corrected, is on its way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from opsd.runbooks.base import Finding, Incident, Series, View
from opsd.runbooks.gpu_ecc import BURST, ERRORS
from opsd.runbooks.lib.gpus import GpuRunbook, by_gpu, gpu_finding, newest, told
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import each_minute, growth, hours_until, number, text

WINDOW_S = 600.0
LEAST_A_MINUTE = 5.0
"""Fewer corrected errors than this are what ECC is for, whatever they do."""

GROWING_MINUTES = 3
"""The last minutes must each have had more than most before them: one burst is no trend."""

GROWN = 2.5
"""So many times as many in the later half of the minutes as in the earlier one: healthy rates wander by less."""

HORIZON_H = 24.0
"""A burst (100 a minute) is predicted for the next day."""

QUIET_S = 300.0
REMAPPED = "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS"


def _outlook(series: Series) -> tuple[list[float], float] | None:
    """Errors in each of the last minutes, and hours until they are a burst; None if that is not foreseen."""
    minutes = each_minute(series, WINDOW_S)
    if not minutes or minutes[-1] < LEAST_A_MINUTE or minutes[-1] >= BURST:
        return None
    half = len(minutes) // 2
    if sum(minutes[-half:]) < GROWN * sum(minutes[:half]):
        return None
    middle = sorted(minutes)[len(minutes) // 2]
    rising = list(takewhile(lambda count: count >= middle, reversed(minutes)))
    hours = hours_until(BURST, minutes)
    return (minutes, hours) if hours is not None and hours <= HORIZON_H and len(rising) >= GROWING_MINUTES else None


def _detect(view: View) -> Iterator[Finding]:
    for series in view.select(ERRORS, type="corrected", counter="volatile"):
        if series.last is not None and (found := _outlook(series)) is not None:
            uuid, gpu, (minutes, hours) = series.labels["UUID"], int(series.labels["gpu"]), found
            remapped, number_of = newest(view, REMAPPED).get(uuid), f"{len(minutes)} minutes"
            facts = (
                f"{minutes[-1]:.0f} corrected ECC errors in the last minute, {minutes[0]:.0f} {number_of} ago",
                f"at this growth {BURST:.0f} a minute in {hours:.1f} hours",
            )
            replaced = f"{remapped:.0f} rows have been replaced for corrected errors" if remapped else ""
            yield gpu_finding(
                view, uuid, gpu, f"GPU {gpu} corrects more and more memory errors",
                (*told(view, uuid, ERRORS, *facts), *told(view, uuid, REMAPPED, replaced)),
                detail="corrected memory errors", confidence=0.7,
                cost="nothing yet; an error that cannot be corrected ends the rank", a_minute=minutes[-1],
            )  # fmt: skip


def _healed(incident: Incident, view: View) -> bool | None:
    """True after five minutes with less than half the errors; None if the counter cannot be read."""
    found = by_gpu(view, ERRORS, type="corrected", counter="volatile").get(text(incident.data, "uuid"))
    if not found or found[0].last is None:
        return None
    usual = (number(incident.data, "a_minute") or 0.0) * QUIET_S / 60
    return view.wall - incident.opened_at > QUIET_S and growth(found[0], QUIET_S) < usual / 2


RUNBOOK = GpuRunbook(
    first=("nvidia-smi -q -d ECC,ROW_REMAPPER -i GPU",),
    detect=_detect,
    remedy=notify_node(": reset it between two runs, and have it replaced if the errors come back"),
    healed=_healed,
    open_after_s=30.0,
    look_every_s=10.0,
    verify_s=3600.0,
    prediction=True,
)
