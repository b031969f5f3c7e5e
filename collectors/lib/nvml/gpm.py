"""Activity of a GPU's units through NVML's GPM (Hopper and later): SM, tensor cores, memory, PCIe and NVLink.

"GPU utilization" is the share of time with any kernel at all on the GPU, and 100 % of it has been seen at a fifth of
the possible throughput. These are what DCGM's profiling metrics are on Hopper, under the same names, without DCGM.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opsd.collectors.base import Metric, Sample
from opsd.collectors.lib.nvml.series import dcgm

MIN_INTERVAL_S: Final = 0.1
"""NVIDIA asks for more than this between the two samples that a metric is calculated from."""

GR_ENGINE_ACTIVE = dcgm("PROF_GR_ENGINE_ACTIVE", "Share of time with any work on the GPU (ratio).", kept=False)
SM_ACTIVE = dcgm("PROF_SM_ACTIVE", "Share of SMs with at least one warp, over time (ratio).", kept=False)
SM_OCCUPANCY = dcgm("PROF_SM_OCCUPANCY", "Share of the possible warps that were resident on SMs (ratio).", kept=False)
TENSOR_ACTIVE = dcgm("PROF_PIPE_TENSOR_ACTIVE", "Share of time in which tensor cores were busy (ratio).", kept=False)
FP64_ACTIVE = dcgm("PROF_PIPE_FP64_ACTIVE", "Share of time in which FP64 units were busy (ratio).", kept=False)
FP32_ACTIVE = dcgm("PROF_PIPE_FP32_ACTIVE", "Share of time in which FP32 units were busy (ratio).", kept=False)
FP16_ACTIVE = dcgm(
    "PROF_PIPE_FP16_ACTIVE", "Share of time in which FP16 units were busy, not tensor cores (ratio).", kept=False
)
DRAM_ACTIVE = dcgm("PROF_DRAM_ACTIVE", "Share of the device memory's bandwidth in use (ratio).", kept=False)
PCIE_SENT = dcgm("PROF_PCIE_TX_BYTES", "Data sent over PCIe, protocol included (bytes per second).", kept=False)
PCIE_RECEIVED = dcgm("PROF_PCIE_RX_BYTES", "Data received over PCIe, protocol included (bytes per second).", kept=False)
NVLINK_SENT = dcgm("PROF_NVLINK_TX_BYTES", "Data sent over all NVLinks (bytes per second).", kept=False)
NVLINK_RECEIVED = dcgm("PROF_NVLINK_RX_BYTES", "Data received over all NVLinks (bytes per second).", kept=False)

_PERCENT, _MIB = 0.01, float(1 << 20)


class Route(NamedTuple):
    """Where a GPM metric, by its number in nvml.h, goes: ``value * scale`` into one series."""

    number: int
    metric: Metric
    scale: float


ROUTES: Final = (
    Route(1, GR_ENGINE_ACTIVE, _PERCENT),
    Route(2, SM_ACTIVE, _PERCENT),
    Route(3, SM_OCCUPANCY, _PERCENT),
    Route(5, TENSOR_ACTIVE, _PERCENT),
    Route(10, DRAM_ACTIVE, _PERCENT),
    Route(11, FP64_ACTIVE, _PERCENT),
    Route(12, FP32_ACTIVE, _PERCENT),
    Route(13, FP16_ACTIVE, _PERCENT),
    Route(20, PCIE_SENT, _MIB),
    Route(21, PCIE_RECEIVED, _MIB),
    Route(60, NVLINK_RECEIVED, _MIB),
    Route(61, NVLINK_SENT, _MIB),
)
METRICS: Final = tuple(route.metric for route in ROUTES)

_VERSION = 1
_ROOM = 512
"""Entries of nvmlGpmMetricsGet_t: 98 to 477 in the headers so far, and a driver may touch all that its header has."""


class _Support(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint), ("supported", ctypes.c_uint))


class _Metric(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint),
        ("result", ctypes.c_uint),
        ("value", ctypes.c_double),
        ("names", ctypes.c_char_p * 3),
    )


class _Request(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("count", ctypes.c_uint),
        ("before", ctypes.c_void_p),
        ("after", ctypes.c_void_p),
        ("metrics", _Metric * _ROOM),
    )


class GpmReader:
    """The units of one GPU. ``check`` raises for a return code of NVML that is not 0.

    Raises what ``check`` raises if the driver has no GPM or refuses it.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        handle: Any,
        check: Callable[[int], None],
        labels: Callable[[Metric], tuple[str, ...]],
    ) -> None:
        self._library = library
        self._handle = handle
        self._check = check
        self._labels = [labels(route.metric) for route in ROUTES]
        self._sampled: float | None = None
        self._last: list[Sample] = []
        self._before, self._after = ctypes.c_void_p(), ctypes.c_void_p()
        for sample in (self._before, self._after):
            check(library.nvmlGpmSampleAlloc(ctypes.byref(sample)))
        self._request = _Request(_VERSION, len(ROUTES))
        for entry, route in zip(self._request.metrics, ROUTES, strict=False):
            entry.number = route.number

    def read(self, now: float) -> list[Sample]:
        """What the units did since the call before; that call's answer again if it was less than a moment ago.

        Empty at the first call. Values without a counter are left out.
        """
        if self._sampled is not None and now - self._sampled <= MIN_INTERVAL_S:
            return self._last
        self._check(self._library.nvmlGpmSampleGet(self._handle, self._after))
        first, self._sampled = self._sampled is None, now
        if not first:
            self._last = self._calculate()
        self._before, self._after = self._after, self._before
        return self._last

    def _calculate(self) -> list[Sample]:
        request = self._request
        request.before, request.after = self._before, self._after
        self._check(self._library.nvmlGpmMetricsGet(ctypes.byref(request)))
        return [
            Sample(route.metric, entry.value * route.scale, labels)
            for entry, route, labels in zip(request.metrics, ROUTES, self._labels, strict=False)
            if not entry.result and not math.isnan(entry.value)
        ]

    def close(self) -> None:
        """Give the sample buffers back."""
        for sample in (self._before, self._after):
            self._library.nvmlGpmSampleFree(sample)


def supported(library: ctypes.CDLL, handle: Any) -> bool:
    """True if the GPU and its driver have GPM."""
    answer = _Support(_VERSION)
    query = getattr(library, "nvmlGpmQueryDeviceSupport", None)
    return query is not None and query(handle, ctypes.byref(answer)) == 0 and bool(answer.supported)
