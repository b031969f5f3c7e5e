"""The GPUs of a node as a table, with a state that sums up what is known of each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from opsd.agent.loop import Snapshot
from opsd.agent.web.api import newest_first
from opsd.agent.web.history import THROTTLED, History, current
from opsd.agent.web.html import TONES, Html, card, h, join, link, nothing, pill, sparkline, table
from opsd.agent.web.incidents import incident_path
from opsd.agent.web.jobs import jobs_on_gpus
from opsd.collectors.base import GpuFact
from opsd.runbooks.base import Incident

THROTTLED_WARN, THROTTLED_BAD = 0.02, 0.1
"""Shares of the last minute."""
NEAR_LIMIT_C: Final = 5.0
USUAL_LIMIT_C: Final = 90.0
"""Assumed where the driver does not say at which temperature the GPU slows itself down."""

_TEMPERATURE: Final = "DCGM_FI_DEV_GPU_TEMP"
_MARGIN: Final = "opsd_gpu_temperature_margin_celsius"
_LIMIT: Final = "opsd_gpu_temperature_threshold_celsius"


def gpu_table(snapshot: Snapshot, history: History, node: str) -> Html:
    """All GPUs of this node."""
    if not snapshot.gpus:
        nvml = next((source for source in snapshot.sources if source.name == "nvml"), None)
        return card("gpus", "GPUs", nothing(nvml.reason if nvml and nvml.reason else "No GPU is known."))
    values, margins = current(snapshot), _margins(snapshot)
    users = {gpu: f"job {job.job}" for job in jobs_on_gpus(snapshot) for gpu in job.gpus}
    users |= {rank.gpu: f"{rank.rank} of {rank.run}" for rank in snapshot.ranks if rank.live and rank.gpu is not None}
    simulated = " (simulated)" if all(gpu.simulated for gpu in snapshot.gpus) else ""
    columns = ("GPU", "State", "Throttled", "Temperature", "Power", "SM clock", "Busy", "Rank or job")
    rows = [
        _row(
            gpu,
            gpu_state(gpu, _worst(snapshot, gpu.index, node), _throttled(history, gpu.uuid), margins.get(gpu.uuid)),
            users.get(gpu.index, "–"),
            values,
            history,
        )
        for gpu in snapshot.gpus
    ]
    return card("gpus", f"GPUs{simulated}", table("GPUs", columns, rows))


def gpu_state(gpu: GpuFact, incident: Incident | None, throttled: float | None, margin_c: float | None) -> Html:
    """The worst that is known of ``gpu``: lost, its ``incident``, throttled, hot; "ok" only if nothing is.

    ``throttled`` is the share of the last minute, ``margin_c`` the degrees left until the GPU slows itself down; None
    if unknown.
    """
    if gpu.lost is not None:
        state = pill(f"lost: {gpu.lost}", "bad")
    elif incident is not None:
        state = pill(link(incident_path(incident), incident.kind.replace("_", " ")), TONES[incident.severity])
    elif throttled is not None and throttled >= THROTTLED_WARN:
        state = pill("throttled", "bad" if throttled >= THROTTLED_BAD else "warn")
    elif margin_c is not None and margin_c <= NEAR_LIMIT_C:
        state = pill("at its heat limit", "bad") if margin_c <= 0 else pill("hot", "warn")
    elif margin_c is None and throttled is None:
        state = pill("answers, nothing measured", "warn")
    else:
        state = pill("ok", "good")
    if not gpu.orphans:
        return state
    return join((state, pill(f"held by dead {', '.join(map(str, gpu.orphans))}", "warn")), " ")


def _worst(snapshot: Snapshot, gpu: int, node: str) -> Incident | None:
    """The gravest open incident whose culprit is GPU ``gpu`` of this node."""
    severities = [*TONES]
    found = [
        incident
        for incident in newest_first(snapshot)
        if incident.resolved_at is None and incident.culprit.gpu == gpu and incident.culprit.node in (None, node)
    ]
    return min(found, key=lambda incident: severities.index(incident.severity), default=None)


def _margins(snapshot: Snapshot) -> dict[str, float]:
    """Degrees left until a GPU slows itself down, by UUID: what the driver says, or its limit less the temperature."""
    told: dict[str, float] = {}
    limits: dict[str, float] = {}
    temperatures: dict[str, float] = {}
    for metric, value, labels in snapshot.select(_MARGIN, _LIMIT, _TEMPERATURE):
        if metric.name == _MARGIN:
            told[labels[1]] = value
        elif metric.name == _TEMPERATURE:
            temperatures[labels[1]] = value
        elif labels[2] == "slowdown":
            limits[labels[1]] = value
    computed = {uuid: limits.get(uuid, USUAL_LIMIT_C) - value for uuid, value in temperatures.items()}
    return {**computed, **told}


def slowdown_limit(snapshot: Snapshot) -> float | None:
    """The lowest temperature at which a GPU of this node slows itself down, None if the driver does not say."""
    told = (value for _, value, labels in snapshot.select(_LIMIT) if labels[2] == "slowdown")
    return min(told, default=None)


def _throttled(history: History, uuid: str) -> float | None:
    """The share of the last minute, from a counter of seconds; None if too little is known."""
    recent = history.values(THROTTLED, uuid)[-1 - round(60 / history.every_s) :]
    if len(recent) < 2:
        return None
    return min(1.0, max(0.0, recent[-1] - recent[0]) / (history.every_s * (len(recent) - 1)))


def _row(
    gpu: GpuFact, state: Html, user: str, values: Mapping[tuple[str, str], float], history: History
) -> Sequence[object]:
    def drawn(name: str, unit: str) -> Html:
        series, value = f"DCGM_FI_DEV_{name}", values.get((f"DCGM_FI_DEV_{name}", gpu.uuid))
        if value is None:
            return h("–")
        label = f"GPU {gpu.index}, {name.lower().replace('_', ' ')}"
        return join((f"{value:.0f} {unit}", sparkline(history.values(series, gpu.uuid), label)))

    share = _throttled(history, gpu.uuid)
    tone = "good" if share is None or share < THROTTLED_WARN else "bad" if share >= THROTTLED_BAD else "warn"
    return (
        gpu.index,
        state,
        h("–") if share is None else pill(f"{share:.0%}", tone),
        drawn("GPU_TEMP", "°C"),
        drawn("POWER_USAGE", "W"),
        drawn("SM_CLOCK", "MHz"),
        drawn("GPU_UTIL", "%"),
        user,
    )
