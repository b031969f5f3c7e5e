"""A person has set a GPU slower: a power limit below its default, or application clocks below the highest."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from opsd.collectors.base import GpuFact
from opsd.runbooks.base import Cause, Finding, Incident, View
from opsd.runbooks.lib.gpus import GpuRunbook, by_gpu, gpu_finding, gpu_of, loaded, newest, rank_on, set_by_opsd, told
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import grouped, text, usual

LIMIT, DEFAULT = "opsd_gpu_power_limit_watts", "opsd_gpu_power_limit_default_watts"
REASONS, CLOCK = "DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_SM_CLOCK"
APPLICATION_CLOCKS = 0x2
"""The bit of the reasons that says that application clocks hold the GPU back (nvmlClocksEventReasons of nvml.h)."""

BELOW, LASTING_S = 0.95, 20.0
"""A limit below this share of what its peers have; reasons that were there for so long."""


def _expected(of_gpus: dict[str, float], uuid: str) -> float:
    """The median of the other GPUs. A fleet that is capped on purpose is capped alike."""
    return median([value for other, value in of_gpus.items() if other != uuid] or [0.0])


def _capped(view: View) -> Iterator[tuple[GpuFact, str, str]]:
    """GPU, metric and words of each cap."""
    limits, defaults, masks = newest(view, LIMIT), newest(view, DEFAULT), by_gpu(view, REASONS)
    for uuid, limit in limits.items():
        gpu, default = gpu_of(view, uuid), defaults.get(uuid, 0.0)
        low = limit < BELOW * default and limit < BELOW * _expected(limits, uuid)
        if gpu is not None and low and not set_by_opsd(view, uuid, limit):
            yield gpu, LIMIT, f"its power limit is {limit:.0f} W, its default {default:.0f} W"
    if not masks:
        return
    clocks = {
        uuid: clock for uuid, one in by_gpu(view, CLOCK).items() if (clock := usual(one[0], LASTING_S)) is not None
    }
    for uuid, series in masks.items():
        gpu, values = gpu_of(view, uuid), [int(mask) for _, mask in series[0].values(LASTING_S)]
        held = len(values) > LASTING_S / 2 and all(mask & APPLICATION_CLOCKS for mask in values)
        if held and gpu is not None and uuid in clocks and clocks[uuid] < BELOW * _expected(clocks, uuid):
            yield gpu, REASONS, f"application clocks hold it at {clocks[uuid]:.0f} MHz"


def _detect(view: View) -> Iterator[Finding]:
    under_load = loaded(view)
    for gpu, caps in grouped(_capped(view), lambda cap: cap[0]).items():
        rank = rank_on(view, gpu.index)
        if under_load(gpu.uuid, rank):
            what = " and ".join(words for *_, words in caps)
            yield gpu_finding(
                view, gpu.uuid, gpu.index, f"GPU {gpu.index} was set slower than its peers: {what}",
                (e for _, metric, words in caps for e in told(view, gpu.uuid, metric, f"GPU {gpu.index}: {words}")),
                detail="set by a person or a tool", confidence=0.95,
                cost="every GPU of the job waits for it" if rank else "",
                watts=newest(view, DEFAULT).get(gpu.uuid),
            )  # fmt: skip


def _healed(incident: Incident, view: View) -> bool | None:
    """True once it is set as its peers are; None while limits and clocks are not known, or not for long."""
    uuid = text(incident.data, "uuid")
    if uuid not in newest(view, LIMIT) or not view.known("nvml"):
        return None
    reasons = by_gpu(view, REASONS).get(uuid)
    if reasons and len(reasons[0].values(LASTING_S)) <= LASTING_S / 2:
        return None
    return all(gpu.uuid != uuid for gpu, _, _ in _capped(view))


RUNBOOK = GpuRunbook(
    first=("nvidia-smi -i GPU -pl WATTS", "nvidia-smi -i GPU -rac"),
    detect=_detect,
    remedy=notify_node(": set it back, unless it was meant"),
    healed=_healed,
    open_after_s=10.0,
    look_every_s=5.0,
    verify_s=3600.0,
    causes=(Cause("gpu_throttle", "gpu", lag_s=86_400.0),),
)
