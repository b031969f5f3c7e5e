"""GPU burn: bf16 products over 90 % of memory on all GPUs at once, their speed, their correctness, and throttling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from opsd.plan.figures import spec_of
from opsd.preflight import gpus
from opsd.preflight.base import Bounds, Check, Context, Measure, Measurement, Outcome, Peers, Progress
from opsd.preflight.burn import Burned, bf16, burn, fp8, size_of
from opsd.preflight.devices import on_each
from opsd.preflight.watch import MEASURES, Watch

if TYPE_CHECKING:
    import torch


def run(context: Context, progress: Progress) -> Outcome:
    """Burn in bf16."""
    return burn_all(context, progress, fp8_products=False)


def burn_all(context: Context, progress: Progress, *, fp8_products: bool) -> Outcome:
    """Burn every GPU at once."""
    devices = gpus.torch_devices(context)

    def work(device: torch.device) -> Burned:
        name = gpus.device_name(device)
        return burn(
            device,
            fp8 if fp8_products else bf16,
            seconds=context.seconds,
            size=size_of(device),
            progress=lambda share: progress(share, name),
        )

    with Watch(context.nvml_library) as watch:
        burned, findings = on_each(devices, work)
    peaks = {gpus.device_name(device): _peak(device, fp8_products) for device in devices}
    return Outcome(
        (*(m for name, result in burned.items() for m in _measure(name, result, peaks[name])), *watch.measurements()),
        (*findings, *watch.findings()),
    )


def _measure(name: str, result: Burned, peak: float) -> Iterator[Measurement]:
    yield Measurement("throughput", result.flops, name)
    yield Measurement("mismatches", result.mismatches, name)
    if peak:
        yield Measurement("of_peak", result.flops / peak, name)


def _peak(device: torch.device, fp8_products: bool) -> float:
    import torch

    spec = spec_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return 0.0 if spec is None else spec.fp8 if fp8_products else spec.bf16


_MEASURES = (
    # 90 % of the best GPU of the node is gpu-fryer's bound; a spread of 5 % inside a node is normal.
    Measure("throughput", "flops", "GEMM throughput", "higher", peers=Peers(0.05, 0.10), noise=0.03),
    Measure("mismatches", "", "wrong elements of products", "lower", Bounds(fail=0)),
    # An H100 SXM sustains about 730 TFLOP/s, 74 % of its data sheet.
    Measure("of_peak", "ratio", "share of the data sheet's FLOP/s", "higher", Bounds(0.68, 0.60), required=False),
    *MEASURES,
)
_ADVICE = "look at clocks and throttling of that GPU; if both are normal, swap the node out and have the GPU replaced"

CHECK = Check(
    name="gpu_burn",
    title="GPU burn in bf16",
    run=run,
    seconds={"quick": 15, "standard": 300, "burn-in": 1200, "spare": 300},
    measures=_MEASURES,
    needs=frozenset({"gpu", "torch", "exclusive"}),
    advice=_ADVICE,
    runbook="gpu_throttle",
)
