"""The NVLink fabric of the node does not work: every link down, CUDA refused for it, or a fatal error of a switch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from opsd.collectors.base import Event
from opsd.runbooks.base import Cost, Culprit, Evidence, Finding, Incident, Runbook, Series, Severity, View
from opsd.runbooks.lib.gpus import driver_restarted
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import REMEMBERED_S, live_ranks, run_recovered, unsolved
from opsd.runbooks.lib.signals import integer, number, said, text

UP, STATE = "opsd_gpu_nvlink_up", "opsd_gpu_fabric_state"
STATUS, PROBLEM = "opsd_gpu_fabric_status", "opsd_gpu_fabric_problem"
NOT_STARTED, REGISTERED, STUCK_S = 1.0, 3.0, 300.0
"""A GPU is registered with the fabric within seconds of the fabric manager's start. After this time it counts as stuck.
A recovery of routes is shorter, too."""

DOWN_S = 60.0
"""After a boot, or a restart of the fabric manager, links may take this long."""

PROOF_S = 60.0
"""Several ranks that train this long after an error of a switch show that the fabric works."""

_WITHOUT_FABRIC = re.compile(r"\b(PCIe|NVL)\b")
"""Models whose links lead to a bridge that need not be there."""

_NOT_READY = re.compile(r"system not yet initialized|SystemNotReady|error 802\b|fabric.?manager", re.IGNORECASE)
"""The error of CUDA on a node with NVSwitches whose fabric is not set up."""


def _all_down(view: View) -> bool | None:
    """True if every NVLink of the node has been down for a minute, None if that is not known or there is no fabric."""
    links = view.select(UP)
    if not links or not view.known("nvml") or any(link.last is None for link in links):
        return None
    if any(link.last for link in links):
        return False
    points = links[0].values(10 * DOWN_S)
    up = [at for at, value in points if value]
    if not up and any(_WITHOUT_FABRIC.search(gpu.model) for gpu in view.gpus):
        return None
    return view.now - max(up, default=points[0][0]) >= DOWN_S


def _wrong(view: View) -> list[str]:
    """What is wrong with the place of GPUs in the fabric, and has been for a while; each with its GPUs."""
    found: dict[str, list[str]] = {}
    for metric, fine, lasting_s in ((STATE, REGISTERED, STUCK_S), (STATUS, 0.0, DOWN_S), (PROBLEM, 0.0, STUCK_S)):
        for series in view.select(metric):
            points = series.values(lasting_s) if series.last not in (None, fine) else ()
            lasted = len(points) > 1 and points[-1][0] - points[0][0] >= 0.95 * lasting_s
            if lasted and all(value != fine for _, value in points):
                found.setdefault(_what(metric, series), []).append(series.labels["gpu"])
    return [f"GPU {', '.join(sorted(gpus))}: {what}" for what, gpus in found.items()]


def _what(metric: str, series: Series) -> str:
    if metric == PROBLEM:
        return f"the fabric says {series.labels['problem'].replace('_', ' ')}"
    if metric == STATUS:
        return f"registering with the fabric has ended with error {series.last:.0f}"
    how = "has not started" if series.last == NOT_STARTED else "has been in progress"
    return f"registering with the fabric {how} for {STUCK_S / 60:.0f} minutes"


def _refused(view: View) -> Iterator[Event]:
    """Ends of ranks whose error says that the fabric is not ready, and whose run has not got over it."""
    for event in unsolved(view, "rank_exited"):
        error = event.data.get("error")
        said = text(error, "message") if isinstance(error, Mapping) else text(event.data, "log_tail")
        if _NOT_READY.search(said):
            yield event


def _fatal(view: View) -> Iterator[Event]:
    """Fatal errors of NVSwitches that nothing has followed which would have cured them."""
    for event in view.events("sxid", REMEMBERED_S):
        if text(event.data, "severity") == "fatal" and not _cured(view, event.at):
            yield event


def _cured(view: View, since: float) -> bool:
    """True if node or driver were restarted after epoch second ``since``, or several ranks train long after it."""
    proven = view.wall - since - PROOF_S
    trained = [rank for rank in view.ranks if rank.steps and view.now - rank.steps[-1].end < proven]
    return driver_restarted(view, since) or len(trained) > 1


def _detect(view: View) -> Iterator[Finding]:
    refused, fatal, ranks = list(_refused(view)), list(_fatal(view)), live_ranks(view)
    facts = [*said(view, "NVML", "every NVLink of the node is down" if _all_down(view) else "", *_wrong(view))]
    facts += [Evidence(event.message, "kernel log", event.at) for event in fatal[-4:]]
    facts += [Evidence(f"rank {text(e.data, 'rank')} ended: {_said(e)}", "launcher", e.at) for e in refused[-4:]]
    if not facts:
        return
    newest = refused[-1].data if refused else {}
    yield Finding(
        key=view.node,
        severity=Severity.CRITICAL if ranks or refused else Severity.WARNING,
        summary=f"the NVLink fabric of {view.node} does not work: {facts[0].text}",
        culprit=Culprit("node", view.node, detail="NVLink fabric"),
        confidence=0.95 if len(facts) > 1 else 0.85,
        evidence=tuple(facts),
        cost=Cost(text=f"{ranks[0].world_size} GPUs cannot train together" if ranks else ""),
        job=ranks[0].job if ranks else "",
        data={
            "at": fatal[-1].at if fatal else None, "run": text(newest, "run"),
            "generation": integer(newest, "generation"),
        },
    )  # fmt: skip


def _said(event: Event) -> str:
    error = event.data.get("error")
    return text(error, "message") if isinstance(error, Mapping) else "the fabric is not ready"


def _healed(incident: Incident, view: View) -> bool | None:
    """True once links are up, the switch's error is cured, and the run that was refused trains."""
    down, fatal_at = _all_down(view), number(incident.data, "at")
    over = run_recovered(incident, view) if text(incident.data, "run") else True
    if down or over is False or _wrong(view) or (fatal_at is not None and not _cured(view, fatal_at)):
        return False
    return None if down is None or over is None else True


RUNBOOK = Runbook(
    first=("journalctl -u nvidia-fabricmanager --since -1hour",),
    detect=_detect,
    remedy=notify_node(": restart the fabric manager, or reset all GPUs and switches of the node together"),
    healed=_healed,
    clear_after_s=30.0,
    verify_s=1800.0,
)
