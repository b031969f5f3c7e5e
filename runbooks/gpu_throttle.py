"""A GPU under load is slowed down by heat or by a power brake, and with it every GPU of its job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from opsd.collectors.base import RankFact
from opsd.runbooks.base import DRAIN, Action, Cause, Cost, Culprit, Finding, Incident, Series, Severity, View
from opsd.runbooks.lib.gpus import GpuRunbook, by_gpu, loaded, rank_on, told
from opsd.runbooks.lib.losses import lost, lost_by, since_first_growth
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import integer, latest, number, seconds_spent, text, usual

THERMAL = ("sw_thermal", "hw_thermal")
REASONS = (*THERMAL, "hw_slowdown", "hw_power_brake")
"""Clocks-event reasons that are throttles. The software power cap is not one: near 700 W it is the normal state."""

THROTTLED, POWER_LIMIT = "opsd_gpu_throttle_seconds_total", "opsd_gpu_power_limit_watts"
CLOCK, TEMPERATURE, POWER = "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE"

SHORT_S, SHORT_LIMIT_S = 6.0, 3.0
VIEWS = ((SHORT_S, SHORT_LIMIT_S), (10.0, 3.5), (30.0, 9.0))
"""A throttle is half of the last 6 s, 35 % of the last 10 s or 30 % of the last 30 s, in the first view that shows one.
A single wild sample adds at most one second."""

QUIET_S = 5.0
CUT, BELOW_DRAW, LOWEST = 0.85, 0.95, 0.6
"""The new power limit is the lesser of 15 % below the old one and 5 % below the draw of the throttled GPU. The cooling
can carry away that draw. Never below 60 % of the default. The clock falls by far
less than power does, and a steady small loss is better than clocks that collapse."""


def unfit_gpus(view: View) -> set[int | None]:
    """Indexes of the GPUs that are throttled or lost now: what is slow on them has its cause there."""
    hot = {uuid for uuid, counters in _counters(view).items() if _throttles(counters)} if view.known("nvml") else set()
    return {gpu.index for gpu in view.gpus if gpu.uuid in hot or gpu.lost is not None}


def _counters(view: View) -> dict[str, dict[str, Series]]:
    """The throttle counters of each GPU: UUID -> reason -> series."""
    found: dict[str, dict[str, Series]] = {}
    for series in view.select(THROTTLED):
        labels = series.labels
        if labels["reason"] in REASONS:
            found.setdefault(labels["UUID"], {})[labels["reason"]] = series
    return found


def _throttles(counters: Mapping[str, Series]) -> list[str]:
    """The reasons that hold the GPU back, by the shortest of ``VIEWS`` that has any."""
    moved = {reason: series for reason, series in counters.items() if seconds_spent(series, VIEWS[-1][0]) > 0}
    for seconds, limit_s in VIEWS:
        if reasons := [reason for reason, series in moved.items() if seconds_spent(series, seconds) >= limit_s]:
            return reasons
    return []


def throttled_gpus(view: View) -> dict[str, list[str]]:
    """The GPUs that are held back, under load or not: UUID -> reasons."""
    return {uuid: reasons for uuid, counters in _counters(view).items() if (reasons := _throttles(counters))}


def _detect(view: View) -> Iterator[Finding]:
    gpus, throttled, under_load = _counters(view), throttled_gpus(view), loaded(view)
    for uuid, reasons in throttled.items():
        index = int(next(iter(gpus[uuid].values())).labels["gpu"])
        rank = rank_on(view, index)
        if under_load(uuid, rank):
            spent = max(seconds_spent(series, 600.0) for series in gpus[uuid].values())
            yield _finding(view, uuid, index, rank, reasons, clocks_of(view, uuid, set(throttled)), spent)


def clocks_of(view: View, uuid: str, throttled: set[str]) -> tuple[float, float] | None:
    """(clock, the clock it should have) in MHz: that of the healthy GPUs under load, else its own past."""
    clocks = {uuid: series for uuid, (series, *_) in by_gpu(view, CLOCK).items()}
    if uuid not in clocks or (clock := usual(clocks[uuid], SHORT_S)) is None:
        return None
    under_load = loaded(view)
    peers = [
        value
        for peer, series in clocks.items()
        if peer not in throttled and under_load(peer, None) and (value := usual(series, SHORT_S)) is not None
    ]
    past = sorted(value for _, value in clocks[uuid].values(600.0))
    return clock, max(clock, median(peers) if peers else past[int(0.9 * (len(past) - 1))])


def _finding(
    view: View,
    uuid: str,
    gpu: int,
    rank: RankFact | None,
    reasons: Sequence[str],
    slowdown: tuple[float, float] | None,
    spent_s: float,
) -> Finding:
    temperature, power, limit = (latest(view, metric, UUID=uuid) for metric in (TEMPERATURE, POWER, POWER_LIMIT))
    facts = {
        THROTTLED: f"throttled by {' and '.join(reasons)} for {spent_s:.0f} s of the last 10 minutes",
        CLOCK: f"SM clock {slowdown[0]:.0f} MHz, {slowdown[1]:.0f} MHz expected under load" if slowdown else "",
        TEMPERATURE: f"temperature {temperature:.0f} °C" if temperature is not None else "",
        POWER: f"power {power:.0f} W of {limit:.0f} W" if power is not None and limit is not None else "",
    }
    return Finding(
        key=uuid,
        severity=Severity.CRITICAL if rank else Severity.WARNING,
        summary=f"GPU {gpu} is throttled by {' and '.join(reasons)}",
        culprit=Culprit("gpu", view.node, gpu, rank.rank if rank else None, " and ".join(reasons)),
        confidence=0.95 if rank else 0.9,
        evidence=tuple(one for metric, fact in facts.items() for one in told(view, uuid, metric, fact)),
        cost=cost_of(view, uuid, rank, slowdown, spent_s),
        job=rank.job if rank else "",
        data={"uuid": uuid, "gpu": gpu, "reasons": list(reasons)},
    )


def cost_of(
    view: View, uuid: str, rank: RankFact | None, clocks: tuple[float, float] | None, spent_s: float = 0.0
) -> Cost:
    """What a throttled GPU costs: measured on its run, else by its clock and the one that it should have."""
    share = 1.0 - clocks[0] / clocks[1] if clocks else 0.0
    lasting_s = max((since_first_growth(one, view.now) for one in _counters(view).get(uuid, {}).values()), default=0.0)
    if rank is not None:
        cost = lost(view, rank, share, lasting_s=lasting_s, counted_s=spent_s)
        return cost if clocks or cost.before else Cost(gpus=rank.world_size)
    return lost_by("this GPU's work", share, 1, spent_s) if clocks else Cost(gpus=1)


def _remedy(incident: Incident, view: View) -> Sequence[Action]:
    uuid, gpu = text(incident.data, "uuid"), integer(incident.data, "gpu")
    if not _throttles(_counters(view).get(uuid, {})):
        return ()  # no load any more, or not known to be over yet: nothing to act on
    reasons = incident.data.get("reasons")
    thermal = isinstance(reasons, list | tuple) and any(reason in THERMAL for reason in reasons)
    limit = latest(view, POWER_LIMIT, UUID=uuid)
    default = latest(view, "opsd_gpu_power_limit_default_watts", UUID=uuid)
    if not thermal or limit is None or default is None:
        cause = "check the cooling" if thermal else "check power supplies and the board"
        return notify_node(f": {cause}, then replace the node", swap=True)(incident, view)
    least = max(LOWEST * default, latest(view, "opsd_gpu_power_limit_min_watts", UUID=uuid) or 0.0)
    power = view.select(POWER, UUID=uuid)
    draws = [draw for series in power if (draw := usual(series, SHORT_LIMIT_S)) is not None]
    watts = round(max(min([CUT * limit, *(BELOW_DRAW * draw for draw in draws)]), least))
    serviced = ": have its cooling serviced, replace the node"
    if watts >= limit:
        return notify_node(serviced, swap=True)(incident, view)
    args = {"gpu": gpu, "watts": watts, "restore_watts": _limit_before(incident, limit)}
    why = f"{incident.summary}: less power is less heat, and a steady clock"
    return (Action("set_power_limit", target=uuid, args=args, reason=why), *notify_node(serviced)(incident, view))


def _limit_before(incident: Incident, limit: float) -> float:
    """The power limit before opsd touched it."""
    for action in incident.actions:
        args = action.get("args")
        if action.get("verb") == "set_power_limit" and isinstance(args, Mapping):
            return number(args, "restore_watts") or limit
    return limit


def _healed(incident: Incident, view: View) -> bool | None:
    """True once the GPU has worked for a while without any throttle. An idle GPU proves nothing."""
    uuid = text(incident.data, "uuid")
    counters = _counters(view).get(uuid)
    if not counters or any(series.last is None for series in counters.values()):
        return None
    if any(seconds_spent(series, QUIET_S) > 0 for series in counters.values()):
        return False
    steady = all(len(series.values(QUIET_S)) >= QUIET_S - 1 for series in counters.values())
    return True if steady and loaded(view)(uuid, rank_on(view, integer(incident.data, "gpu"))) else None


RUNBOOK = GpuRunbook(
    first=("nvidia-smi -i GPU -pl WATTS", DRAIN),
    detect=_detect,
    remedy=_remedy,
    healed=_healed,
    proved_by="load",
    verify_s=60.0,
    max_attempts=2,
    causes=(Cause("node_throttle", "node"),),
)
