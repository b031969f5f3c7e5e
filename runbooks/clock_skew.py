"""The node's wall clock was stepped, runs away, or is not corrected any more."""

from __future__ import annotations

from collections.abc import Iterator

from opsd.runbooks.base import Cost, Culprit, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import live_ranks
from opsd.runbooks.lib.signals import latest, said, text

BOOTED = "opsd_host_boot_time_seconds"
"""The kernel derives it from the wall clock, so that it moves by as much as that is stepped."""

SYNCHRONISED, OFFSET = "opsd_host_clock_synchronized", "opsd_host_clock_offset_seconds"
MAX_ERROR = "opsd_host_clock_max_error_seconds"
"""The kernel adds 0.5 ms a second since the last correction; from 16 s on it takes the clock for not synchronised."""

UNCORRECTED_S, CORRECTED_S = 5.0, 1.0
"""Errors possible. Time services correct every half hour at least, which keeps them below one second."""

DRIFT = 500e-6

WINDOW_S = STEADY_S = 300.0
STEP_S = 3.0
"""The kernel tells whole seconds; a clock that is kept right is moved by milliseconds."""

CREDENTIAL_S = 300.0
"""MUNGE refuses credentials whose time differs by more (munged(8)): Slurm then does not talk to the node."""


def _moved(view: View, seconds: float) -> float | None:
    """Seconds by which the clock was moved since its first reading within ``seconds``, None if that is not known."""
    series = view.select(BOOTED)
    if not series or series[0].last is None:
        return None
    return series[0].last - series[0].values(seconds)[0][1]


def _detect(view: View) -> Iterator[Finding]:
    moved, error = _moved(view, WINDOW_S), latest(view, MAX_ERROR)
    if moved is not None and abs(moved) >= STEP_S:
        yield _stepped(view, moved)
    if error is not None and error >= UNCORRECTED_S:
        yield _uncorrected(view, error)


def _uncorrected(view: View, error: float) -> Finding:
    """The time service has stopped. A clock that no service has ever kept, as a container's, has no such error."""
    hours, offset = error / DRIFT / 3600.0, latest(view, OFFSET)
    return Finding(
        key=f"{view.node}/uncorrected",
        severity=Severity.WARNING,
        summary=f"no time service has corrected the clock of {view.node} for about {hours:.0f} hours",
        culprit=Culprit("node", view.node, detail="time service"),
        confidence=0.9,
        evidence=said(
            view, "kernel",
            f"the kernel says that the clock may be {error:.1f} s off: the last correction was about {hours:.0f} h ago",
            f"{1e3 * offset:.1f} ms of that correction are left" if offset else "",
        ),
        cost=Cost(text="nothing itself; once the clock is minutes off, Slurm refuses the node"),
        data={"what": "uncorrected"},
    )  # fmt: skip


def _stepped(view: View, moved: float) -> Finding:
    ranks, known = live_ranks(view), latest(view, SYNCHRONISED)
    how = f"{abs(moved):.0f} s {'forward' if moved > 0 else 'back'}"
    kept = {1.0: "a time service keeps the clock", 0.0: "no time service keeps the clock"}
    return Finding(
        key=view.node,
        severity=Severity.WARNING,
        summary=f"the clock of {view.node} was moved {how}",
        culprit=Culprit("node", view.node, detail="wall clock"),
        confidence=0.95,
        evidence=said(
            view, "host", f"the wall clock went {how} against the monotonic one within five minutes",
            f"more than the {CREDENTIAL_S:.0f} s that MUNGE tolerates" if abs(moved) > CREDENTIAL_S else "",
            "" if known is None else kept.get(known, ""),
        ),
        cost=Cost(text="nothing itself; Slurm and logs that are compared with other nodes may suffer" if ranks else ""),
        job=ranks[0].job if ranks else "",
    )  # fmt: skip


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the clock is corrected again, or has been steady for five minutes; others tell whether it is right."""
    if text(incident.data, "what") == "uncorrected":
        error = latest(view, MAX_ERROR)
        return error < CORRECTED_S if error is not None else None
    series = view.select(BOOTED)
    if not series or series[0].last is None:
        return None
    points = series[0].values(STEADY_S)
    values = [value for _, value in points]
    return points[-1][0] - points[0][0] >= 0.9 * STEADY_S and max(values) - min(values) < STEP_S


RUNBOOK = Runbook(
    first=("chronyc tracking",),
    detect=_detect,
    remedy=notify_node(": see which of both times was right"),
    healed=_healed,
    needs=("host",),
    open_after_s=2.0,
    verify_s=1800.0,
)
