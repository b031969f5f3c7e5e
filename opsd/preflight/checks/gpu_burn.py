"""GPU burn: bf16 products over 90 % of memory on all GPUs at once, their speed, their correctness, and throttling.

The same product is written into a ring of outputs: every multiplier works and every byte of the ring is rewritten. A
product of the same operands in the same shape is bit-identical, so any difference is a hardware fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Final

from opsd.plan.hardware import spec_of
from opsd.preflight import gpus
from opsd.preflight.base import (
    Bounds,
    Check,
    Context,
    CouldNotRunError,
    Measure,
    Measurement,
    NotApplicableError,
    Outcome,
    Peers,
    Progress,
)
from opsd.preflight.gpus import on_each, synchronise
from opsd.preflight.watch import MEASURES, Watch

if TYPE_CHECKING:
    import torch

_MEMORY_SHARE: Final = 0.90
_SLICE_S: Final = 0.25
_CPU_RING: Final = 4


@dataclass(frozen=True, slots=True)
class Burned:
    """``flops`` is the median rate over slices of a quarter second; ``mismatches`` counts differing elements."""

    flops: float
    slowest: float
    mismatches: int
    products: int


Multiply = Callable[["torch.Tensor"], None]
"""Writes the product into the given output."""


def size_of(device: torch.device) -> int:
    """Rows and columns of the operands: 8192 keeps every SM busy and a product at 1.5 ms."""
    return 8192 if device.type == "cuda" else 256


def bf16(device: torch.device, size: int) -> Multiply:
    """The product of two bf16 matrices of ``size`` rows and columns."""
    import torch

    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def multiply(out: torch.Tensor) -> None:
        torch.mm(left, right, out=out)

    return multiply


def fp8(device: torch.device, size: int) -> Multiply:
    """The product of two e4m3 matrices, scaled by 1, into bf16. Raises NotApplicableError without such hardware."""
    import torch

    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise NotApplicableError("these GPUs have no fp8 arithmetic")
    left = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)

    def multiply(out: torch.Tensor) -> None:
        torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=out.dtype, out=out)

    return multiply


def burn(
    device: torch.device,
    prepare: Callable[[torch.device, int], Multiply],
    *,
    seconds: float,
    size: int,
    progress: Callable[[float], None],
) -> Burned:
    """Burn for ``seconds``. Raises RuntimeError if the device fails, CouldNotRunError if its memory is in use."""
    import torch

    torch.manual_seed(0)
    multiply = prepare(device, size)
    ring = _ring(device, size)
    multiply(ring[0])
    synchronise(device)
    flops_each = 2.0 * size**3
    batch = _calibrate(device, multiply, ring)
    rates: list[float] = []
    products = 0
    began = time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or not rates:
        progress(min(1.0, elapsed / seconds))
        start = time.perf_counter()
        for step in range(batch):
            multiply(ring[1 + (products + step) % (len(ring) - 1)])
        synchronise(device)
        products += batch
        rates.append(batch * flops_each / (time.perf_counter() - start))
    used = min(products, len(ring) - 1)
    mismatches = sum(int((ring[0] != other).sum()) for other in ring[1 : 1 + used])
    return Burned(median(rates), min(rates), mismatches, products)


def _ring(device: torch.device, size: int) -> list[torch.Tensor]:
    import torch

    count = _CPU_RING
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free < total / 2:
            raise CouldNotRunError(f"{device} has only {free >> 30} of {total >> 30} GiB free; end what uses it")
        count = max(2, int(free * _MEMORY_SHARE) // (2 * size * size))
    return [torch.empty(size, size, device=device, dtype=torch.bfloat16) for _ in range(count)]


def _calibrate(device: torch.device, multiply: Multiply, ring: list[torch.Tensor]) -> int:
    """How many products fill a slice, so that synchronisation takes no noticeable time."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < _SLICE_S:
        for _ in range(4):
            multiply(ring[1])
        synchronise(device)
        count += 4
    return max(1, count)


def run(context: Context, progress: Progress) -> Outcome:
    """Burn in bf16."""
    return burn_all(context, progress, fp8_products=False)


def run_fp8(context: Context, progress: Progress) -> Outcome:
    """Burn in fp8, which draws other power than bf16 and uses other units."""
    return burn_all(context, progress, fp8_products=True)


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
FP8 = replace(CHECK, name="gpu_burn_fp8", title="GPU burn in fp8", run=run_fp8, seconds={"burn-in": 600})
