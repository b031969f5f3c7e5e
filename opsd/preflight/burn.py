"""Burns one device with matrix products over nearly all of its memory, and compares every product with the first.

The same product is written into a ring of outputs: every multiplier works and every byte of the ring is rewritten. A
product of the same operands in the same shape is bit-identical, so any difference is a hardware fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from opsd.preflight.base import CouldNotRunError, NotApplicableError

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


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
