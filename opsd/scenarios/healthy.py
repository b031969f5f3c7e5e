"""What the series of a healthy node look like: the background of every scenario."""

from __future__ import annotations

from collections.abc import Iterator

from collectors import nvml_series as nvml
from collectors.base import Metric
from collectors.throttle import REASONS
from opsd.scenarios.signals import Signal

LINKS = 18

Course = tuple[Metric, tuple[str, ...], Signal]
"""A metric, the values of those labels that do not identify the GPU, and how its value goes."""


def gpu(loaded: bool) -> Iterator[Course]:
    """The series of one H100: at its power cap if ``loaded``, else idle."""
    yield nvml.UP, (), Signal(1)
    yield nvml.GPU_UTIL, (), Signal(99 if loaded else 0)
    yield nvml.MEM_COPY_UTIL, (), Signal(60 if loaded else 0)
    yield nvml.GPU_TEMP, (), Signal(64 if loaded else 32, noise=0.6)
    yield nvml.MEMORY_TEMP, (), Signal(72 if loaded else 35, noise=0.6)
    yield nvml.POWER_USAGE, (), Signal(692 if loaded else 71, noise=4)
    yield nvml.SM_CLOCK, (), Signal(1755 if loaded else 345, noise=8)
    yield nvml.MEM_CLOCK, (), Signal(2619)
    yield nvml.POWER_LIMIT, (), Signal(700)
    yield nvml.POWER_LIMIT_DEFAULT, (), Signal(700)
    yield nvml.POWER_LIMIT_MIN, (), Signal(200)
    yield nvml.POWER_LIMIT_MAX, (), Signal(700)
    yield nvml.TEMPERATURE_MARGIN, (), Signal(23 if loaded else 55, noise=0.6)
    for reason in REASONS:
        yield nvml.THROTTLE, (reason,), Signal(1000, rate=0.9 if loaded and reason == "sw_power_cap" else 0)
    yield from _memory_health()
    yield from _links()


def _memory_health() -> Iterator[Course]:
    for kind in ("corrected", "uncorrected"):
        for counter in ("volatile", "aggregate"):
            yield nvml.ECC_ERRORS, (kind, counter), Signal(0)
    yield nvml.REMAPPED_CORRECTABLE, (), Signal(0)
    yield nvml.REMAPPED_UNCORRECTABLE, (), Signal(0)
    yield nvml.REMAP_PENDING, (), Signal(0)
    yield nvml.REMAP_FAILURE, (), Signal(0)
    yield nvml.RECOVERY_ACTION, (), Signal(0)
    yield nvml.XID_ERRORS, (), Signal(0)


def _links() -> Iterator[Course]:
    yield nvml.PCIE_GENERATION, (), Signal(5)
    yield nvml.PCIE_GENERATION_MAX, (), Signal(5)
    yield nvml.PCIE_WIDTH, (), Signal(16)
    yield nvml.PCIE_WIDTH_MAX, (), Signal(16)
    yield nvml.PCIE_REPLAYS, (), Signal(3)
    for link in range(LINKS):
        yield nvml.NVLINK_UP, (str(link),), Signal(1)
    for kind in ("crc_flit", "crc_data", "replay", "recovery"):
        yield nvml.NVLINK_ERRORS, (kind,), Signal(0)
