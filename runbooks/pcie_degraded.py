"""A GPU's PCIe link runs with fewer lanes or a lower generation than it can, or repeats packets all the time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from opsd.runbooks.base import Finding, Incident, View
from opsd.runbooks.lib.gpus import GpuRunbook, by_gpu, gpu_finding, gpu_of, loaded, newest, rank_on, told
from opsd.runbooks.lib.remedies import notify_node
from opsd.runbooks.lib.signals import growth, text

WIDTH, WIDTH_MAX = "opsd_gpu_pcie_link_width", "opsd_gpu_pcie_link_width_max"
GENERATION, GENERATION_MAX = "opsd_gpu_pcie_link_generation", "opsd_gpu_pcie_link_generation_max"
REPLAYS = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"
ERRORS, ERRORS_S = "opsd_gpu_pcie_errors_total", 600.0
REPLAY_S, REPLAY_LIMIT = 60.0, 60.0
"""One packet a second sent again, on average over a minute; a healthy link repeats a few in a day."""
PAST_S = 600.0


@dataclass(frozen=True, slots=True)
class _Links:
    """The PCIe links of the node's GPUs by UUID. ``better`` are those that were wider or faster some minutes ago."""

    width: Mapping[str, float]
    width_max: Mapping[str, float]
    generation: Mapping[str, float]
    generation_max: Mapping[str, float]
    better: frozenset[str]

    @classmethod
    def of(cls, view: View) -> _Links:
        series = [(uuid, one[0]) for name in (WIDTH, GENERATION) for uuid, one in by_gpu(view, name).items()]
        changed = [(uuid, one, one.last) for uuid, one in series if one.last and not one.unchanged(PAST_S)]
        better = {uuid for uuid, one, now in changed if max(value for _, value in one.values(PAST_S)) > now}
        width, width_max, generation, best = (newest(view, n) for n in (WIDTH, WIDTH_MAX, GENERATION, GENERATION_MAX))
        return cls(width, width_max, generation, best, frozenset(better))

    def with_changed(self, uuid: str) -> _Links:
        """The same, with this GPU as one whose link was better."""
        return replace(self, better=self.better | {uuid})

    def faults(self, uuid: str, under_load: bool) -> list[str]:
        """What is wrong with the link of one GPU. A lower generation without load saves power and is normal."""
        found = []
        if lanes := self._missed(self.width, self.width_max, uuid):
            found.append(f"{self.width[uuid]:.0f} of {lanes:.0f} lanes")
        if under_load and (best := self._missed(self.generation, self.generation_max, uuid)):
            found.append(f"generation {self.generation[uuid]:.0f} instead of {best:.0f}")
        return found

    def _missed(self, values: Mapping[str, float], limits: Mapping[str, float], uuid: str) -> float:
        """The best that the link can do if it does less, else 0.

        That is its own word, or that of most peers if it is more (a slot that trained down). If several GPUs are alike
        in this and were never better, their board gives no more.
        """
        value, own = values.get(uuid), limits.get(uuid)
        if value is None or own is None or value >= (best := max(own, median_low(limits.values()))):
            return 0.0
        alike = sum(values.get(other) == value and limits[other] == own for other in limits)
        return 0.0 if alike > 1 and uuid not in self.better else best


def _replays(view: View) -> dict[str, float]:
    found = {uuid: growth(series[0], REPLAY_S) for uuid, series in by_gpu(view, REPLAYS).items()}
    return {uuid: count for uuid, count in found.items() if count >= REPLAY_LIMIT}


def _errors(view: View) -> dict[str, list[str]]:
    """Errors of the last minutes that the link has not corrected, by GPU; fatal ones first."""
    found: dict[str, list[str]] = {}
    for severity in ("fatal", "non_fatal"):
        for uuid, series in by_gpu(view, ERRORS, severity=severity).items():
            if series[0].last and (count := growth(series[0], ERRORS_S)) >= 1:
                found.setdefault(uuid, []).append(f"{count:.0f} {severity.replace('_', '-')} errors in ten minutes")
    return found


def _detect(view: View) -> Iterator[Finding]:
    links, replays, errors, under_load = _Links.of(view), _replays(view), _errors(view), loaded(view)
    for gpu in view.gpus:
        faults = links.faults(gpu.uuid, under_load(gpu.uuid, rank_on(view, gpu.index)))
        if gpu.uuid in replays:
            faults.append(f"{replays[gpu.uuid]:.0f} packets repeated in a minute")
        faults += errors.get(gpu.uuid, [])
        if faults:
            what = " and ".join(faults)
            yield gpu_finding(
                view, gpu.uuid, gpu.index, f"the PCIe link of GPU {gpu.index} is degraded: {what}",
                told(view, gpu.uuid, REPLAYS, f"PCIe link of GPU {gpu.index}: {what}"), detail=what, confidence=0.9,
                cost="copies between host and GPU, and network traffic of this GPU, are slower",
            )  # fmt: skip


def _healed(incident: Incident, view: View) -> bool | None:
    """True if the link is as it should be, under load; an idle link cannot tell its generation."""
    uuid = text(incident.data, "uuid")
    links, gpu = _Links.of(view), gpu_of(view, uuid)
    if gpu is None or uuid not in links.width or uuid not in links.generation:
        return None
    busy = loaded(view)(uuid, rank_on(view, gpu.index))
    if links.with_changed(uuid).faults(uuid, busy) or uuid in _replays(view) or uuid in _errors(view):
        return False
    return True if busy else None


RUNBOOK = GpuRunbook(
    detect=_detect,
    remedy=notify_node(": reseat or replace at the next service"),
    healed=_healed,
    open_after_s=10.0,
    look_every_s=2.0,
    clear_after_s=60.0,
    verify_s=3600.0,
)
