"""Memory is reserved as huge pages that nobody uses: ranks and the page cache do without it."""

from __future__ import annotations

from collections.abc import Iterator

from opsd.runbooks.base import Cost, Culprit, Evidence, Finding, Guide, Incident, Runbook, Severity, View
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import latest

TOTAL, STATE, MEMORY = "opsd_hugepages_total_bytes", "opsd_hugepages_state_bytes", "opsd_host_memory_total_bytes"

SHARE = 0.1
"""Share of the memory that may be reserved and unused."""

GIB = 2**30


def _idle(view: View) -> tuple[float, float] | None:
    """Bytes that are reserved and unused, and their share of the memory; None if one of the two is not known."""
    free, memory = latest(view, STATE, state="free"), latest(view, MEMORY)
    return None if free is None or not memory else (free, free / memory)


def _detect(view: View) -> Iterator[Finding]:
    idle = _idle(view)
    if idle is not None and idle[1] > SHARE:
        total = latest(view, TOTAL) or idle[0]
        yield Finding(
            kind="hugepages_idle",
            key=view.node,
            severity=Severity.WARNING,
            summary=f"{idle[0] / GIB:.0f} GiB of {view.node} are reserved as huge pages and not used",
            culprit=Culprit("node", view.node, detail="huge pages"),
            confidence=0.9,
            evidence=(
                Evidence(f"of {total / GIB:.0f} GiB of huge pages {idle[0] / total:.0%} are free", "host", view.wall),
            ),
            cost=Cost(text="less memory for loaders and the page cache"),
        )


def _healed(incident: Incident, view: View) -> bool | None:
    idle = _idle(view)
    return None if idle is None else idle[1] <= SHARE / 2


RUNBOOK = Runbook(
    kind="hugepages_idle",
    guide=Guide.parse("""
# Huge pages are reserved and not used

## Meaning
More than a tenth of main memory is reserved as huge pages, and no process uses them, for half a minute.

## Impact
Loaders and the page cache have less memory; the node may run out of it early.

## Diagnosis
1. `opsd incidents show ID`: how much is reserved and how much of that is free.
2. `grep -i huge /proc/meminfo`: the same, from the kernel.

## Mitigation
- Set `vm.nr_hugepages` to what is used, with `sysctl -w`, and in the file that set it.

## What opsd does by itself
- observe: opens the incident, resolves it once the pages are used or given back.
- recommend, act: the same, and notifies.
"""),
    detect=_detect,
    remedy=notify_node(),
    healed=_healed,
    needs=("hugepages", "host"),
    open_after_s=30.0,
    clear_after_s=30.0,
    verify_s=900.0,
)
