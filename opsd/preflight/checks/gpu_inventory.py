"""All GPUs are present, identical to each other and to the last run, and connected as expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from opsd.collectors.base import GpuFact
from opsd.collectors.lib.nvml import driver, series
from opsd.preflight import gpus
from opsd.preflight.base import Bounds, Check, Context, Finding, Measure, Measurement, Outcome, Peers, Progress, Verdict

DOMAIN: Final = "NVLink domain"
"""The fact that names it, as ``UUID.CLIQUE``; missing where the node shares none with others."""


def run(context: Context, progress: Progress) -> Outcome:
    """Compare NVML's GPUs with the expected count and with each other."""
    snapshot = gpus.look(context)
    present = [gpu for gpu in snapshot.gpus if gpu.lost is None]
    findings = [*_lost(snapshot.gpus), *_count(context.settings.gpus, len(present)), *_alike(present)]
    measurements = [Measurement("gpus", len(present))]
    facts = {**_layout(snapshot, present), **_domain(snapshot, present)}
    for gpu in present:
        findings += _links(snapshot, gpu)
        measurements += _measure(snapshot, gpu)
        facts[gpus.name(gpu)] = f"{gpu.model} {gpu.uuid} at {gpu.pci_bus_id}"
        facts[f"VBIOS of {gpus.name(gpu)}"] = snapshot.labels(gpu, series.INFO).get("vbios_version", "unknown")
    return Outcome(tuple(measurements), tuple(findings), facts)


def _layout(snapshot: gpus.Snapshot, present: Sequence[GpuFact]) -> dict[str, str]:
    """What has to be equal on all nodes of the same type."""
    links = Counter(sample.labels[0] for sample in snapshot.samples if sample.metric is series.NVLINK_UP)
    models = Counter(gpu.model for gpu in present)
    return {
        "GPUs": ", ".join(f"{count} x {model}" for model, count in sorted(models.items())),
        "PCI addresses of the GPUs": " ".join(gpu.pci_bus_id for gpu in present),
        "NVLinks of the GPUs": " ".join(str(links[str(gpu.index)]) for gpu in present),
    }


def _domain(snapshot: gpus.Snapshot, present: Sequence[GpuFact]) -> dict[str, str]:
    told = [snapshot.labels(gpu, series.FABRIC_INFO) for gpu in present]
    domain = driver.common_domain([(one["cluster_uuid"], int(one["clique"])) if one else None for one in told])
    return {DOMAIN: domain} if domain else {}


def _lost(found: Sequence[GpuFact]) -> Iterator[Finding]:
    for gpu in found:
        if gpu.lost is not None:
            advice = "drain the node and reboot it; if the GPU stays away, reseat or replace it"
            yield Finding(Verdict.FAIL, f"{gpus.name(gpu)} does not answer: {gpu.lost}", advice, gpus.name(gpu))


def _count(expected: int | None, found: int) -> Iterator[Finding]:
    if expected is not None and found != expected:
        advice = "count them with `lspci -d 10de:` to tell a lost GPU from a driver that ignores one"
        yield Finding(Verdict.FAIL, f"{found} GPUs answer, the node must have {expected}", advice)


def _alike(present: list[GpuFact]) -> Iterator[Finding]:
    models = Counter(gpu.model for gpu in present)
    if len(models) > 1:
        usual = models.most_common(1)[0][0]
        for gpu in present:
            if gpu.model != usual:
                yield Finding(
                    Verdict.FAIL, f"{gpus.name(gpu)} is a {gpu.model}, the others are {usual}", "", gpus.name(gpu)
                )


def _links(snapshot: gpus.Snapshot, gpu: GpuFact) -> Iterator[Finding]:
    down = [
        dict(zip(series.NVLINK_UP.labels, sample.labels, strict=True))["link"]
        for sample in snapshot.samples
        if sample.metric is series.NVLINK_UP and sample.labels[0] == str(gpu.index) and not sample.value
    ]
    if down:
        summary = f"{gpus.name(gpu)}: {len(down)} NVLinks are down ({', '.join(down)})"
        yield Finding(Verdict.FAIL, summary, "check nvidia-fabricmanager, then reset the GPU", gpus.name(gpu))
    width, full = snapshot.value(gpu, series.PCIE_WIDTH), snapshot.value(gpu, series.PCIE_WIDTH_MAX)
    if width is not None and full is not None and width < full:
        summary = f"{gpus.name(gpu)}: the PCIe link has {width:.0f} of {full:.0f} lanes"
        yield Finding(Verdict.FAIL, summary, "reseat the GPU or its riser", gpus.name(gpu))
    if snapshot.value(gpu, series.PERSISTENCE) == 0:
        advice = "systemctl enable --now nvidia-persistenced"
        yield Finding(Verdict.WARN, f"{gpus.name(gpu)}: persistence mode is off", advice, gpus.name(gpu))


def _measure(snapshot: gpus.Snapshot, gpu: GpuFact) -> Iterator[Measurement]:
    for measure, metric in (("memory", series.MEMORY_TOTAL), ("power_limit", series.POWER_LIMIT)):
        value = snapshot.value(gpu, metric)
        if value is not None:
            yield Measurement(measure, value, gpus.name(gpu))


CHECK = Check(
    name="gpu_inventory",
    title="GPUs, their links and firmware",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "burn-in", "spare"), 2),
    measures=(
        Measure("gpus", "", "number of GPUs that answer", "higher", Bounds(fail=1), noise=0.001),
        Measure("memory", "bytes", "device memory", "higher", peers=Peers(0.01, 0.02), required=False),
        Measure("power_limit", "watts", "power limit", "higher", peers=Peers(0.01, 0.05), required=False),
    ),
    needs=frozenset({"gpu"}),
    advice="compare with a healthy node of the same kind",
    stable=True,
)
