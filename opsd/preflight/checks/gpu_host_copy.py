"""Copies between pinned host memory and each GPU, one GPU after the other: the PCIe link and the path to it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from opsd.preflight import gpus
from opsd.preflight.base import Bounds, Check, Context, Finding, Measure, Measurement, Outcome, Peers, Progress
from opsd.preflight.gpus import on_each, synchronise

if TYPE_CHECKING:
    import torch

_BYTES: Final = {"cuda": 1 << 30, "cpu": 1 << 20}


def run(context: Context, progress: Progress) -> Outcome:
    """Copy to and from every device for its share of ``context.seconds``, and compare what comes back."""
    devices = gpus.torch_devices(context)
    seconds = context.seconds / len(devices) / 2
    measurements: list[Measurement] = []
    findings: list[Finding] = []
    for done, device in enumerate(devices):
        progress(done / len(devices), "")
        found, failed = on_each([device], lambda one: copies(one, seconds))
        findings += failed
        for name, (to_device, from_device, damaged) in found.items():
            measurements.append(Measurement("to_device", to_device, name))
            measurements.append(Measurement("from_device", from_device, name))
            measurements.append(Measurement("damaged", damaged, name))
    return Outcome(tuple(measurements), tuple(findings))


def copies(device: torch.device, seconds: float) -> tuple[float, float, int]:
    """Bytes per second to the device and back, and how many bytes came back changed."""
    import torch

    pinned = device.type == "cuda"
    host = torch.randint(0, 256, (_BYTES[device.type],), dtype=torch.uint8, pin_memory=pinned)
    back = torch.empty_like(host, pin_memory=pinned)
    there = torch.empty_like(host, device=device)
    rates = [_rate(device, target, source, seconds) for target, source in ((there, host), (back, there))]
    return rates[0], rates[1], int((host != back).sum())


def _rate(device: torch.device, target: torch.Tensor, source: torch.Tensor, seconds: float) -> float:
    target.copy_(source, non_blocking=True)
    synchronise(device)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds or not count:
        target.copy_(source, non_blocking=True)
        synchronise(device)
        count += 1
    return source.nbytes * count / (time.perf_counter() - began)


CHECK = Check(
    name="gpu_host_copy",
    title="Copies between host and GPU",
    run=run,
    seconds={"quick": 4, "standard": 20, "spare": 20},
    measures=(
        Measure("to_device", "bytes_per_second", "copies to the GPU", "higher", peers=Peers(0.10, 0.25), noise=0.05),
        Measure("from_device", "bytes_per_second", "copies back", "higher", peers=Peers(0.10, 0.25), noise=0.05),
        Measure("damaged", "", "bytes that came back changed", "lower", Bounds(fail=0)),
    ),
    needs=frozenset({"gpu", "torch", "exclusive"}),
    advice="compare PCIe generation and width under load with `nvidia-smi -q -d PCIE`; 55 GB/s is normal for an H100",
    runbook="pcie_degraded",
)
