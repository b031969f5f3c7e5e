"""What the driver reports about each GPU's health: ECC errors, row remapping, link errors, and its recovery action.

The recovery action (driver 570 and newer) is the most reliable: DCGM has called GPUs healthy while it was Reset.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from opsd.collectors.base import GpuFact, Metric
from opsd.collectors.lib.nvml import series
from opsd.preflight import gpus
from opsd.preflight.base import Bounds, Check, Context, Finding, Measure, Measurement, Outcome, Progress, Verdict

_RECOVERY: Final = {
    1: "a GPU reset (`nvidia-smi --gpu-reset`)",
    2: "a reboot of the node",
    3: "its peer-to-peer traffic to be drained",
    4: "the node to be drained and the GPU reset",
    5: "the IMEX domain to be recovered",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
_COUNTERS: Final[tuple[tuple[str, Metric, tuple[str, ...]], ...]] = (
    ("ecc_uncorrected", series.ECC_ERRORS, ("uncorrected", "volatile")),
    ("ecc_corrected", series.ECC_ERRORS, ("corrected", "volatile")),
    ("rows_remapped", series.REMAPPED_UNCORRECTABLE, ()),
    ("pcie_replays", series.PCIE_REPLAYS, ()),
    ("temperature", series.GPU_TEMP, ()),
)


def run(context: Context, progress: Progress) -> Outcome:
    """Read counters and states of every GPU that answers; one that does not is a failure."""
    snapshot = gpus.look(context)
    measurements: list[Measurement] = []
    findings: list[Finding] = []
    for gpu in snapshot.gpus:
        if gpu.lost is not None:
            summary = f"{gpus.name(gpu)} does not answer: {gpu.lost}"
            findings.append(Finding(Verdict.FAIL, summary, "drain the node and reboot it", gpus.name(gpu)))
            continue
        findings += _states(snapshot, gpu)
        for measure, metric, extra in _COUNTERS:
            value = snapshot.value(gpu, metric, *extra)
            if value is not None:
                measurements.append(Measurement(measure, value, gpus.name(gpu)))
    return Outcome(tuple(measurements), tuple(findings))


def _states(snapshot: gpus.Snapshot, gpu: GpuFact) -> Iterator[Finding]:
    name = gpus.name(gpu)
    action = int(snapshot.value(gpu, series.RECOVERY_ACTION) or 0)
    if action:
        wanted = _RECOVERY.get(action, f"recovery action {action}")
        yield Finding(Verdict.FAIL, f"{name}: the driver asks for {wanted}", "drain the node first", name)
    if snapshot.value(gpu, series.REMAP_FAILURE):
        yield Finding(Verdict.FAIL, f"{name}: a memory row could not be remapped", "return the GPU to the vendor", name)
    if snapshot.value(gpu, series.REMAP_PENDING):
        yield Finding(Verdict.FAIL, f"{name}: a row remapping waits for a reset", "reset the GPU before the run", name)


CHECK = Check(
    name="gpu_health",
    title="GPU memory errors, remapped rows and what the driver asks for",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "burn-in", "spare"), 2),
    measures=(
        Measure(
            "ecc_uncorrected",
            "",
            "uncorrected ECC errors since the driver was loaded",
            "lower",
            Bounds(fail=0),
            required=False,
        ),
        Measure("ecc_corrected", "", "corrected ECC errors", growth=Bounds(warn=100), required=False),
        Measure(
            "rows_remapped",
            "",
            "rows remapped after uncorrectable errors",
            growth=Bounds(warn=1, fail=4),
            required=False,
        ),
        Measure("pcie_replays", "", "PCIe replays", growth=Bounds(warn=100), required=False),
        Measure("temperature", "celsius", "temperature at rest", "lower", Bounds(warn=60, fail=80), noise=0.3),
    ),
    needs=frozenset({"gpu"}),
    advice="drain the node, reset the GPU, and replace it if the errors come back",
    runbook="gpu_ecc",
)
