"""Pure helpers about GPUs: which one a series belongs to, which rank uses it, whether it is under load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from opsd.collectors.base import Event, GpuFact, RankFact
from opsd.runbooks.base import Cost, Culprit, Evidence, Finding, Runbook, Series, Severity, View
from opsd.runbooks.lib.signals import grouped, latest, number, said, text, usual

LOADED_PERCENT = 30.0
LOAD_S = 6.0
"""A GPU is under load if its utilization has been above this in the last seconds."""
SOURCES = {"nvml": "NVML", "dcgm": "DCGM"}
"""The names of the collectors' sources in evidence."""


GpuRunbook = partial(Runbook, needs=("nvml",))
"""A runbook that is blind without the driver."""


def by_gpu(view: View, metric: str, **labels: str) -> dict[str, list[Series]]:
    """The series of ``metric`` for each GPU, by UUID; those without a sample in this tick come last.

    A GPU may have changed its index or its model's name and have old series beside the new ones.
    """
    found = grouped(view.select(metric, **labels), lambda series: series.labels["UUID"])
    for several in found.values():
        if len(several) > 1:
            several.sort(key=lambda series: series.last is None)
    return found


def told(view: View, uuid: str, metric: str, *facts: str) -> tuple[Evidence, ...]:
    """``facts`` (empty ones left out) as evidence from what delivers the GPU's series of ``metric``."""
    series = by_gpu(view, metric).get(uuid)
    source = SOURCES.get(series[0].source, series[0].source) if series else SOURCES["nvml"]
    return said(view, source, *facts)


def job_evidence(view: View, rank: RankFact | None) -> Evidence:
    """Whose rank works on a GPU, which only the rank pages tell."""
    return Evidence(job_text(rank), "rank pages", view.wall)


def newest(view: View, metric: str, **labels: str) -> dict[str, float]:
    """The value of each GPU's series in this tick, by UUID; GPUs without one are left out."""
    series = by_gpu(view, metric, **labels)
    return {uuid: value for uuid, (one, *_) in series.items() if (value := one.last) is not None}


def gpu_of(view: View, uuid: str) -> GpuFact | None:
    """The GPU with this UUID, None if the node has no such GPU now."""
    return next((gpu for gpu in view.gpus if gpu.uuid == uuid), None)


def set_by_opsd(view: View, uuid: str, watts: float) -> bool:
    """True if opsd itself has given the GPU the power limit that it has."""
    done = view.done("set_power_limit", uuid)
    return done is not None and abs((number(done.args, "watts") or 0.0) - watts) < 1.0


def xids_of(view: View, gpu: GpuFact, seconds: float) -> list[Event]:
    """The GPU's Xids of the last ``seconds``, oldest first; the kernel log knows a GPU by its PCI address only."""
    known_as = {"uuid": gpu.uuid, "pci_bus_id": gpu.pci_bus_id}
    return [
        event
        for event in view.events("xid", seconds)
        if any(name and text(event.data, key) == name for key, name in known_as.items())
    ]


def rank_on(view: View, gpu: int) -> RankFact | None:
    """The live rank that works on the GPU of this index."""
    return next((rank for rank in view.ranks if rank.gpu == gpu and rank.live), None)


def gpu_culprit(view: View, gpu: int, detail: str) -> tuple[Culprit, RankFact | None]:
    """The GPU as the culprit, and the live rank on it if there is one."""
    rank = rank_on(view, gpu)
    return Culprit("gpu", view.node, gpu, rank.rank if rank else None, detail), rank


def gpu_finding(
    view: View, uuid: str, gpu: int, summary: str, evidence: Iterable[Evidence], *,
    detail: str, confidence: float, severity: Severity = Severity.WARNING, cost: str | Cost = "", key: str = "",
    **data: object,
) -> Finding:  # fmt: skip
    """A fault of one GPU, with the live rank on it, whose job it concerns, in culprit and evidence.

    ``detail`` is that of the culprit, ``data`` is kept beside UUID and index.
    """
    culprit, rank = gpu_culprit(view, gpu, detail)
    return Finding(
        key=key or uuid,
        severity=severity,
        summary=summary,
        culprit=culprit,
        confidence=confidence,
        evidence=(*evidence, job_evidence(view, rank)),
        cost=Cost(text=cost) if isinstance(cost, str) else cost,
        job=rank.job if rank else "",
        data={"uuid": uuid, "gpu": gpu, **data},
    )


def loaded(view: View) -> Callable[[str, RankFact | None], bool]:
    """A function of UUID and rank on the GPU that tells whether it is under load.

    Utilization decides where it is known, the presence of a rank where it is not.
    """
    utilization = {uuid: usual(series[0], LOAD_S) for uuid, series in by_gpu(view, "DCGM_FI_DEV_GPU_UTIL").items()}

    def judge(uuid: str, rank: RankFact | None) -> bool:
        percent = utilization.get(uuid)
        return rank is not None if percent is None else percent >= LOADED_PERCENT

    return judge


def driver_restarted(view: View, since: float) -> bool:
    """True if the node was booted or the driver loaded after the wall second ``since``."""
    booted = latest(view, "opsd_host_boot_time_seconds")
    loads = view.events("gpu_driver_loaded", view.wall - since)
    return (booted is not None and booted > since) or any(event.at > since for event in loads)


def job_text(rank: RankFact | None) -> str:
    """The job or run of the rank, as the end of a sentence."""
    if rank is None:
        return "no rank works on it"
    whose = f"job {rank.job}" if rank.job else f"run {rank.run}"
    return f"rank {rank.rank} of {whose} works on it"


def fresh(series: Sequence[Series]) -> bool:
    """True if every series has a sample in this tick."""
    return all(one.last is not None for one in series)
