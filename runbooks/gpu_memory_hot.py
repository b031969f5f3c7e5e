"""The memory of a GPU is at its highest temperature, where the driver slows it down and errors become likely."""

from __future__ import annotations

from collections.abc import Iterator

from opsd.runbooks.base import DRAIN, Cause, Finding, Incident, View
from opsd.runbooks.lib.gpus import GpuRunbook, by_gpu, gpu_finding, gpu_of, newest, rank_on, told
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import text, usual

TEMPERATURE, LIMIT = "DCGM_FI_DEV_MEMORY_TEMP", "opsd_gpu_temperature_threshold_celsius"
LASTING_S = 30.0
COOLER = 3.0
"""So many degrees below its limit the memory counts as cool again."""


def _heat(view: View) -> dict[str, tuple[float, float]]:
    """Temperature of the last half minute and its limit, by GPU; empty without limits of the driver."""
    limits = newest(view, LIMIT, threshold="memory_max")
    found = {}
    for uuid, series in by_gpu(view, TEMPERATURE).items() if limits else ():
        celsius = usual(series[0], LASTING_S)
        if uuid in limits and limits[uuid] > 0 and celsius is not None and series[0].last is not None:
            found[uuid] = celsius, limits[uuid]
    return found


def _detect(view: View) -> Iterator[Finding]:
    for uuid, (celsius, limit) in _heat(view).items():
        gpu = gpu_of(view, uuid)
        if gpu is None or celsius < limit:
            continue
        what = f"the memory of GPU {gpu.index} is at {celsius:.0f} °C, its limit is {limit:.0f} °C"
        costs = "its clocks are held back, and memory errors become likely" if rank_on(view, gpu.index) else ""
        told_of = told(view, uuid, TEMPERATURE, what)
        yield gpu_finding(view, uuid, gpu.index, what, told_of, detail="memory cooling", confidence=0.95, cost=costs)


def _healed(incident: Incident, view: View) -> bool | None:
    heat = _heat(view).get(text(incident.data, "uuid"))
    return None if heat is None else heat[0] <= heat[1] - COOLER


RUNBOOK = GpuRunbook(
    first=("nvidia-smi -i GPU -pl WATTS", DRAIN),
    detect=_detect,
    remedy=notify_node(": have the cooling of the GPU serviced"),
    healed=_healed,
    look_every_s=5.0,
    clear_after_s=30.0,
    verify_s=1800.0,
    causes=(Cause("node_throttle", "node"),),
)
