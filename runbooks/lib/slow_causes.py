"""What the witnesses on this node say about a rank that computes slowly: its GPU's limits and clocks, and the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from opsd.runbooks.base import Evidence, Finding, View
from opsd.runbooks.lib.gpus import newest, set_by_opsd, told
from opsd.runbooks.lib.signals import seconds_spent

CLOCK = "DCGM_FI_DEV_SM_CLOCK"
POWER_LIMIT, POWER_DEFAULT = "opsd_gpu_power_limit_watts", "opsd_gpu_power_limit_default_watts"
REASONS = "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"
PRESSURE = "opsd_host_pressure_seconds_total"
COOLING = "opsd_thermal_cooling_ratio"
BEHIND = 0.95
"""A clock or limit below this share of what it should be explains a slow rank."""
SET_BY_SOMEBODY = 0x2
"""The bit of the reasons for clocks set by a user (nvmlClocksEventReasonApplicationsClocksSetting in nvml.h)."""
LOOK_S = 30.0
PRESSURE_SHARE = 0.1
"""Tasks that wait for processor or memory for this share of the time slow a rank down."""


@dataclass(frozen=True, slots=True)
class SlowCause:
    """Component and detail of a culprit, with the evidence."""

    component: str
    detail: str
    evidence: tuple[Evidence, ...]


def explained(finding: Finding, view: View) -> Finding:
    """The finding with the likeliest of what the witnesses say; as it is if they say nothing."""
    cause = next(_causes(view, finding.culprit.gpu), None)
    if cause is None:
        return finding
    return replace(
        finding,
        culprit=replace(finding.culprit, component=cause.component, detail=cause.detail),
        confidence=max(finding.confidence, 0.9),
        evidence=(*finding.evidence, *cause.evidence),
    )


def _causes(view: View, gpu: int | None) -> Iterator[SlowCause]:
    if gpu is not None and view.known("nvml"):
        yield from _power(view, gpu)
        yield from _clock(view, gpu)
    if view.known("host"):
        yield from _host(view)
    if view.known("thermal"):
        yield from _heat(view)


def _indexes(view: View) -> dict[str, int]:
    return {fact.uuid: fact.index for fact in view.gpus}


def _own(view: View, metric: str, gpu: int) -> tuple[str, float, list[float]] | None:
    """UUID and value of the GPU with this index, and the values of the others."""
    indexes = _indexes(view)
    values = {uuid: value for uuid, value in newest(view, metric).items() if uuid in indexes}
    uuid = next((uuid for uuid in values if indexes[uuid] == gpu), None)
    return None if uuid is None else (uuid, values[uuid], [v for other, v in values.items() if other != uuid])


def _power(view: View, gpu: int) -> Iterator[SlowCause]:
    """The limit in force is below the board's default: somebody has set it."""
    limit, default = _own(view, POWER_LIMIT, gpu), _own(view, POWER_DEFAULT, gpu)
    if limit is None or default is None or limit[1] >= BEHIND * default[1]:
        return
    who = "opsd lowered it" if set_by_opsd(view, limit[0], limit[1]) else "it was set by somebody"
    said = f"the power limit of GPU {gpu} is {limit[1]:.0f} W, its default {default[1]:.0f} W: {who}"
    yield SlowCause("gpu", "power cap", told(view, limit[0], POWER_LIMIT, said))


def _clock(view: View, gpu: int) -> Iterator[SlowCause]:
    own = _own(view, CLOCK, gpu)
    if own is None or not own[2] or own[1] > BEHIND * median(own[2]):
        return
    said = f"the SM clock of GPU {gpu} is {own[1]:.0f} MHz, its peers' {median(own[2]):.0f} MHz"
    if int(newest(view, REASONS).get(own[0], 0.0)) & SET_BY_SOMEBODY:
        limited = "the driver says that clocks set by somebody hold it back (nvidia-smi --reset-applications-clocks)"
        yield SlowCause("gpu", "application clocks", told(view, own[0], CLOCK, said, limited))
    yield SlowCause("gpu", "low clock", told(view, own[0], CLOCK, said))


def _host(view: View) -> Iterator[SlowCause]:
    for resource, kind, words in (("memory", "full", "memory"), ("cpu", "some", "a processor")):
        for series in view.select(PRESSURE, resource=resource, kind=kind):
            share = seconds_spent(series, LOOK_S) / LOOK_S
            if share > PRESSURE_SHARE and len(series.values(LOOK_S)) > 1:
                said = f"tasks on this node waited for {words} in {share:.0%} of the last {LOOK_S:.0f} s"
                yield SlowCause("node", f"{resource} pressure", (Evidence(said, "kernel", view.wall),))


def _heat(view: View) -> Iterator[SlowCause]:
    """Processors that the kernel has held back all the time. Other cooling devices, as fans, are there to be used."""
    for series in view.select(COOLING, type="Processor"):
        ratios = [value for _, value in series.values(LOOK_S)]
        if len(ratios) > 1 and series.last and min(ratios) > 0:
            said = f"the kernel holds processors back for their heat, by {series.last:.0%} of what it can"
            yield SlowCause("node", "processor heat", (Evidence(said, "kernel", view.wall),))
