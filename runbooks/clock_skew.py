"""The node's wall clock was stepped, or runs away."""

from __future__ import annotations

from collections.abc import Iterator

from opsd.runbooks.base import Cost, Culprit, Evidence, Finding, Guide, Incident, Runbook, Severity, View
from opsd.runbooks.lib.remedies import notify_node

BOOTED = "opsd_host_boot_time_seconds"
"""The kernel derives it from the wall clock, so that it moves by as much as that is stepped."""

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
    moved = _moved(view, WINDOW_S)
    if moved is not None and abs(moved) >= STEP_S:
        yield _finding(view, moved)


def _finding(view: View, moved: float) -> Finding:
    ranks = [rank for rank in view.ranks if rank.live]
    how = f"{abs(moved):.0f} s {'forward' if moved > 0 else 'back'}"
    refused = f"more than the {CREDENTIAL_S:.0f} s that MUNGE tolerates" if abs(moved) > CREDENTIAL_S else ""
    fact = f"the wall clock went {how} against the monotonic one within five minutes"
    return Finding(
        kind="clock_skew",
        key=view.node,
        severity=Severity.WARNING,
        summary=f"the clock of {view.node} was moved {how}",
        culprit=Culprit("node", view.node, detail="wall clock"),
        confidence=0.95,
        evidence=tuple(Evidence(text, "host", view.wall) for text in (fact, refused) if text),
        cost=Cost(text="nothing itself; Slurm and logs that are compared with other nodes may suffer" if ranks else ""),
        job=ranks[0].job if ranks else "",
    )


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the clock has been steady for five minutes; whether it is right only others can tell."""
    series = view.select(BOOTED)
    if not series or series[0].last is None:
        return None
    points = series[0].values(STEADY_S)
    values = [value for _, value in points]
    return points[-1][0] - points[0][0] >= 0.9 * STEADY_S and max(values) - min(values) < STEP_S


RUNBOOK = Runbook(
    kind="clock_skew",
    guide=Guide.parse("""
# The clock was stepped

## Meaning
The node's wall clock jumped by at least 3 s against the monotonic clock. A person set it, or time synchronisation
corrected it. It was wrong either before or after the step; the incident does not know which. Constant offsets and
offsets of less than 3 s are not detected.

## Impact
Training and opsd's own measurements are not affected. With an offset of more than five minutes, Slurm and other users
of MUNGE lose contact with the node. Certificates and file times may be wrong, and logs of several nodes cannot be
compared.

## Diagnosis
1. `opsd incidents show ID`: by how much, and which way.
2. `chronyc tracking` and `chronyc sources -v`: is it synchronised now, with which source, and how large was the offset?
3. `journalctl --since -1hour -u chronyd -u systemd-timesyncd -u ntpd`: the step and its reason.
4. `journalctl -k --since -1day | grep -iE "clocksource|tsc"`: a clock source that the kernel has rejected.
5. Many nodes at once: the time server.

## Mitigation
- The clock is right now: nothing to do, the incident resolves by itself.
- The clock is wrong now: `chronyc makestep`, and find out what set it.
- It drifts again: the board's clock or battery is faulty; drain (`opsd drain NODE --incident ID --reason WHY`).

## What opsd does by itself
- observe: opens the incident; resolves it once the clock had no step for five minutes.
- recommend, act: the same, and notifies. It never sets a clock.
"""),
    first=("chronyc tracking",),
    detect=_detect,
    remedy=notify_node(": see which of both times was right"),
    healed=_healed,
    needs=("host",),
    open_after_s=2.0,
    verify_s=1800.0,
)
