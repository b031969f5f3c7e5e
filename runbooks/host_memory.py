"""The node's main memory runs out: little is left, or processes already wait for it."""

from __future__ import annotations

from collections.abc import Iterator

from opsd.runbooks.base import Cost, Culprit, Finding, Incident, Runbook, Severity, View
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.runs import live_ranks
from opsd.runbooks.lib.signals import latest, said, seconds_spent

TOTAL, AVAILABLE = "opsd_host_memory_total_bytes", "opsd_host_memory_available_bytes"
SHARED, PRESSURE = "opsd_host_memory_shared_bytes", "opsd_host_pressure_seconds_total"
SWAPPED = "opsd_host_swap_used_bytes"

LOW, CRITICAL = 0.05, 0.02
"""Share of the memory that can still be had without swapping."""

PRESSURE_S, STALLED = 10.0, 0.1
"""All tasks at once waited for memory in a tenth of the last seconds: the node is thrashing."""

LARGE_SHARED = 0.3
GIB = 2**30


def _state(view: View) -> tuple[float, float, float] | None:
    """(bytes available, share of the total, share of the last seconds stalled), None if memory is not known."""
    total, available = latest(view, TOTAL), latest(view, AVAILABLE)
    if not total or available is None:
        return None
    pressure = view.select(PRESSURE, resource="memory", kind="full")
    stalled = seconds_spent(pressure[0], PRESSURE_S) / PRESSURE_S if pressure else 0.0
    return available, available / total, stalled


def _detect(view: View) -> Iterator[Finding]:
    if (state := _state(view)) is None or (state[1] >= LOW and state[2] < STALLED):
        return
    (available, share, stalled), ranks = state, live_ranks(view)
    total, shared, swapped = latest(view, TOTAL) or 1.0, latest(view, SHARED) or 0.0, latest(view, SWAPPED) or 0.0
    of_shared = f"{shared / GIB:.0f} GiB are shared memory" if shared > LARGE_SHARED * total else ""
    facts = (
        f"{available / GIB:.1f} GiB ({share:.1%}) of the memory are left",
        f"all tasks waited for memory in {stalled:.0%} of the last {PRESSURE_S:.0f} s" if stalled else "",
        of_shared,
        f"{swapped / GIB:.1f} GiB are swapped out" if swapped >= GIB / 10 else "",
    )
    yield Finding(
        key=view.node,
        severity=Severity.CRITICAL if share < CRITICAL or stalled >= STALLED else Severity.WARNING,
        summary=f"{view.node} runs out of memory: {available / GIB:.1f} GiB left",
        culprit=Culprit("node", view.node, detail="shared memory" if of_shared else ""),
        confidence=0.9,
        evidence=said(view, "host", *facts),
        cost=Cost(text=f"the kernel may kill one of {len(ranks)} ranks here" if ranks else ""),
        job=ranks[0].job if ranks else "",
    )


def _healed(incident: Incident, view: View) -> bool | None:
    state = _state(view)
    return None if state is None else state[1] >= 1.2 * LOW and state[2] < STALLED / 2


RUNBOOK = Runbook(
    first=("ps -eo pid,rss,comm --sort=-rss",),
    detect=_detect,
    remedy=notify_node(),
    healed=_healed,
    needs=("host",),
    open_after_s=5.0,
    clear_after_s=30.0,
    verify_s=900.0,
)
