"""Several GPUs of a node are throttled together: the node's cooling or its power, not the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opsd.collectors.base import RankFact
from opsd.runbooks.base import Cost, Culprit, Finding, Incident, Severity, View
from opsd.runbooks.gpu_throttle import THERMAL, THROTTLED, clocks_of, cost_of, throttled_gpus
from opsd.runbooks.lib.gpus import GpuRunbook, loaded, rank_on, told
from opsd.runbooks.lib.remedies import notify_node

LEAST, SHARE = 3, 0.5
"""So many GPUs, and this share of those under load: heat sinks do not fail together."""


def _together(view: View) -> Mapping[str, Sequence[str]]:
    """UUIDs and reasons of the GPUs under load that are throttled, if they are so many."""
    throttled = throttled_gpus(view)
    if len(throttled) < LEAST:
        return {}
    under_load = loaded(view)
    busy = {gpu.uuid for gpu in view.gpus if under_load(gpu.uuid, rank_on(view, gpu.index))}
    found = {uuid: reasons for uuid, reasons in throttled.items() if uuid in busy}
    return found if len(found) >= max(LEAST, SHARE * len(busy)) else {}


def _detect(view: View) -> Iterator[Finding]:
    if not (together := _together(view)):
        return
    indexes = sorted(gpu.index for gpu in view.gpus if gpu.uuid in together)
    reasons = sorted({reason for of_gpu in together.values() for reason in of_gpu})
    what = "cooling" if any(reason in THERMAL for reason in reasons) else "power supply"
    names = ", ".join(map(str, indexes))
    ranks = [rank for index in indexes if (rank := rank_on(view, index)) is not None]
    fact = f"GPUs {names} are throttled together by {' and '.join(reasons)}"
    yield Finding(
        key=view.node,
        severity=Severity.CRITICAL if ranks else Severity.WARNING,
        summary=f"{view.node}: {fact}",
        culprit=Culprit("node", view.node, detail=f"{what} of GPUs {names}"),
        confidence=0.95,
        evidence=told(view, next(iter(together)), THROTTLED, fact),
        cost=_cost(view, together, ranks),
        job=ranks[0].job if ranks else "",
        data={"uuids": sorted(together)},
    )


def _cost(view: View, together: Mapping[str, Sequence[str]], ranks: Sequence[RankFact]) -> Cost:
    """The run waits for the GPU whose clock has fallen the most."""
    if not ranks:
        return Cost()
    found = [(clocks, uuid) for uuid in together if (clocks := clocks_of(view, uuid, set(together)))]
    slowest, uuid = min(found, key=lambda one: one[0][0] / one[0][1], default=(None, next(iter(together))))
    return cost_of(view, uuid, ranks[0], slowest)


def _healed(incident: Incident, view: View) -> bool | None:
    """True once fewer than half of its GPUs are throttled; what is left is an incident of those GPUs."""
    listed = incident.data.get("uuids")
    if not view.known("nvml") or not isinstance(listed, list | tuple):
        return None
    still = sum(uuid in throttled_gpus(view) for uuid in listed)
    return still < SHARE * len(listed)


RUNBOOK = GpuRunbook(
    detect=_detect,
    remedy=notify_node(": have fans, coolant and power supplies checked", swap=True),
    healed=_healed,
    clear_after_s=10.0,
    verify_s=600.0,
)
