"""Bandwidth of the GPUs' own memory: copies between two large buffers, all GPUs at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from opsd.plan.hardware import spec_of
from opsd.preflight import gpus
from opsd.preflight.base import Bounds, Check, Context, Measure, Measurement, Outcome, Peers, Progress
from opsd.preflight.gpus import on_each, synchronise

if TYPE_CHECKING:
    import torch

_BYTES: Final = {"cuda": 4 << 30, "cpu": 1 << 22}
_BATCH: Final = 8


def run(context: Context, progress: Progress) -> Outcome:
    """Copy for ``context.seconds``; every byte copied counts as one read and one written."""
    devices = gpus.torch_devices(context)

    def work(device: torch.device) -> float:
        name = gpus.device_name(device)
        return bandwidth(device, context.seconds, lambda share: progress(share, name))

    rates, findings = on_each(devices, work)
    measurements = [Measurement("bandwidth", rate, name) for name, rate in rates.items()]
    for device in devices:
        name, share = gpus.device_name(device), _spec(device)
        if share and name in rates:
            measurements.append(Measurement("of_peak", rates[name] / share, name))
    return Outcome(tuple(measurements), tuple(findings))


def bandwidth(device: torch.device, seconds: float, progress: Callable[[float], None]) -> float:
    """Bytes per second read and written."""
    import torch

    source = torch.zeros(_BYTES[device.type], device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronise(device)
    copies = 0
    began = time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or not copies:
        for _ in range(_BATCH):
            target.copy_(source)
        synchronise(device)
        copies += _BATCH
        progress(min(1.0, elapsed / seconds))
    return 2.0 * source.nbytes * copies / (time.perf_counter() - began)


def _spec(device: torch.device) -> float:
    import torch

    spec = spec_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return spec.memory if spec else 0.0


CHECK = Check(
    name="gpu_memory",
    title="Bandwidth of GPU memory",
    run=run,
    seconds={"quick": 3, "standard": 20, "burn-in": 120, "spare": 20},
    measures=(
        Measure("bandwidth", "bytes_per_second", "copy bandwidth", "higher", peers=Peers(0.03, 0.08), noise=0.02),
        # An H100 SXM copies 2.9 of its data sheet's 3.35 TB/s.
        Measure("of_peak", "ratio", "share of the data sheet", "higher", Bounds(0.80, 0.70), required=False),
    ),
    needs=frozenset({"gpu", "torch", "exclusive"}),
    advice="look for ECC errors and remapped rows of that GPU",
    runbook="gpu_ecc",
)
