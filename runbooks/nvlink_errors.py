"""NVLink between the GPUs of a node: a link that went down, or links with repeated errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from opsd.runbooks.base import Finding, Incident, Series, Severity, View
from opsd.runbooks.lib.gpus import GpuRunbook, by_gpu, fresh, gpu_finding, rank_on, told
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import growth, text

ERRORS, UP = "opsd_gpu_nvlink_errors_total", "opsd_gpu_nvlink_up"
SHORT_S = 60.0
LIMITS: Mapping[str, float] = {"recovery": 1.0, "replay": 30.0, "crc_flit": 1000.0, "crc_data": 30.0}
"""Errors per minute. A recovery stops and retrains the link; the others are repaired by retransmission and matter only
in large numbers."""

QUIET_S = 300.0


def _detect(view: View) -> Iterator[Finding]:
    indexes = {gpu.uuid: gpu.index for gpu in view.gpus if gpu.lost is None}
    down, errors = _down(view), _errors(view)
    for uuid in indexes.keys() & (down.keys() | errors.keys()):
        gpu, links = indexes[uuid], down.get(uuid, [])
        facts = [f"link {', '.join(links)} down"] * bool(links) + errors.get(uuid, [])
        what = " and ".join(facts)
        yield gpu_finding(
            view, uuid, gpu, f"NVLink of GPU {gpu}: {what}", told(view, uuid, ERRORS, *facts),
            detail=what, confidence=0.9,
            severity=Severity.CRITICAL if links and rank_on(view, gpu) else Severity.WARNING,
            cost="collectives inside the node run at the pace of its slowest link",
        )  # fmt: skip


def _down(view: View) -> dict[str, list[str]]:
    """Links that are down and should not be, by UUID: up on most GPUs of the node, or up before on this one.

    Some boards leave links unconnected, on every GPU the same ones. All links down is the fabric, not a link.
    """
    states: dict[str, list[Series]] = {}
    for series in view.select(UP):
        if series.last is not None:
            states.setdefault(series.labels["link"], []).append(series)
    found: dict[str, list[str]] = {}
    if not any(series.last for links in states.values() for series in links):
        return found
    for link, links in states.items():
        mostly_up = sum(bool(series.last) for series in links) > len(links) / 2
        for series in links:
            if not series.last and (mostly_up or any(value for _, value in series.values(600.0))):
                found.setdefault(series.labels["UUID"], []).append(link)
    return found


def _errors(view: View) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for series in view.select(ERRORS):
        kind, grown = series.labels["type"], growth(series, SHORT_S)
        if grown >= LIMITS.get(kind, float("inf")):
            found.setdefault(series.labels["UUID"], []).append(f"{grown:.0f} {kind} errors in a minute")
    return found


def _healed(incident: Incident, view: View) -> bool | None:
    """True after quiet minutes with all links up: an intermittent fault shows itself again within that time or not."""
    uuid = text(incident.data, "uuid")
    counters, links = by_gpu(view, ERRORS).get(uuid, []), by_gpu(view, UP).get(uuid, [])
    if not counters or not links or not fresh(counters) or not fresh(links):
        return None
    return all(link.last for link in links) and all(_quiet(series) for series in counters)


def _quiet(series: Series) -> bool:
    limit = LIMITS.get(series.labels["type"], float("inf"))
    points = series.values(QUIET_S)
    return len(points) > 0.9 * QUIET_S and points[-1][1] - points[0][1] < limit


RUNBOOK = GpuRunbook(
    detect=_detect,
    remedy=notify_node(": swap the node out at the next checkpoint", swap=True),
    healed=_healed,
    open_after_s=10.0,
    look_every_s=2.0,
    verify_s=1800.0,
)
