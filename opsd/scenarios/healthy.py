"""The series of a healthy node, with which every scenario begins."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from opsd.collectors import host as host_collector
from opsd.collectors import infiniband, nvme
from opsd.collectors import slurm as slurm_collector
from opsd.collectors.base import Metric
from opsd.collectors.lib import storage as storage_series
from opsd.collectors.lib.nvml import series as nvml
from opsd.collectors.lib.nvml.gpu import REASONS
from opsd.scenarios.model import Value


@dataclass
class Signal:
    """``value`` at second ``at``, then ``rate`` per second, up to ``target`` if there is one; None while absent."""

    value: float
    at: float = 0.0
    rate: float = 0.0
    target: float | None = None
    noise: float = 0.0
    absent: bool = False

    def exact(self, now: float) -> float:
        """The value at second ``now`` without its noise."""
        value = self.value + self.rate * (now - self.at)
        if self.target is not None and (value - self.target) * self.rate >= 0:
            return self.target
        return value

    def read(self, now: float, rng: random.Random) -> float | None:
        """What a collector reads at second ``now``."""
        if self.absent:
            return None
        value = self.exact(now) if self.rate else self.value
        return rng.gauss(value, self.noise) if self.noise else value

    def become(self, value: Value, now: float) -> None:
        """Take a new course from second ``now`` on."""
        present = self.exact(now)
        self.absent = value == "absent"
        if isinstance(value, float | int):
            self.value, self.at, self.rate, self.target = float(value), now, 0.0, None
        elif not isinstance(value, str):
            self.noise = self.noise if value.noise is None else value.noise
            self.value, self.at, self.target = present + (value.add or 0.0), now, None
            self.rate = value.rate or 0.0
            if value.to is not None and value.over > 0:
                self.target = value.to
                self.rate = (value.to - self.value) / value.over
            elif value.to is not None:
                self.value = value.to


LINKS = 18
GIB = 2.0**30

Course = tuple[Metric, tuple[str, ...], Signal]
"""A metric, the values of those labels that do not identify the GPU, and the course of its value."""


def gpu(loaded: bool) -> Iterator[Course]:
    """The series of one H100: at its power cap if ``loaded``, else idle."""
    yield nvml.UP, (), Signal(1)
    yield nvml.GPU_UTIL, (), Signal(99 if loaded else 0)
    yield nvml.MEM_COPY_UTIL, (), Signal(60 if loaded else 0)
    yield nvml.GPU_TEMP, (), Signal(64 if loaded else 32, noise=0.6)
    yield nvml.MEMORY_TEMP, (), Signal(72 if loaded else 35, noise=0.6)
    yield nvml.POWER_USAGE, (), Signal(692 if loaded else 71, noise=4)
    yield nvml.PROCESSES, (), Signal(0)
    yield nvml.FB_USED, (), Signal(600)
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


def host() -> Iterator[Course]:
    """The series of a training node with 2 TiB of memory and local NVMe."""
    yield host_collector.MEMORY_TOTAL, (), Signal(2048 * GIB)
    yield host_collector.MEMORY_AVAILABLE, (), Signal(1500 * GIB, noise=GIB)
    yield host_collector.MEMORY_SHARED, (), Signal(40 * GIB)
    yield host_collector.SWAP_TOTAL, (), Signal(0)
    yield host_collector.SWAP_USED, (), Signal(0)
    yield host_collector.CLOCK_SYNCED, (), Signal(1)
    yield host_collector.CLOCK_OFFSET, (), Signal(1e-5)
    yield host_collector.CLOCK_ERROR, (), Signal(0.02)
    for resource in host_collector.RESOURCES:
        for kind in ("some", "full"):
            yield host_collector.PRESSURE, (resource, kind), Signal(100, rate=0.001)
    for mount, size, free in (("/", 1800, 1200), ("/scratch", 27_000, 9000), ("/dev/shm", 1024, 980)):  # noqa: S108
        yield host_collector.DISK_SIZE, (mount,), Signal(size * GIB)
        yield host_collector.DISK_AVAILABLE, (mount,), Signal(free * GIB)
        yield host_collector.INODES, (mount,), Signal(100e6)
        yield host_collector.INODES_FREE, (mount,), Signal(90e6)


def fabric(ports: int) -> Iterator[Course]:
    """The series of ``ports`` InfiniBand NDR ports, one per GPU."""
    for index in range(ports):
        port = (f"mlx5_{index}", "1")
        yield infiniband.INFO, (*port, "InfiniBand", "28.39.1002", "MT_0000000838", ""), Signal(1)
        yield infiniband.STATE, port, Signal(4)
        yield infiniband.PHYSICAL_STATE, port, Signal(5)
        yield infiniband.RATE, port, Signal(50e9)
        for error in ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "packet_seq_err"):
            yield infiniband.ERRORS, (*port, error), Signal(0)


def storage() -> Iterator[Course]:
    """The series of a local NVMe drive with the dataset, an NFS mount for results, and the page cache."""
    for op, latency_s in (("read", 0.0002), ("write", 0.0003)):
        yield storage_series.IO_LATENCY, ("nvme0n1", op), Signal(latency_s, noise=latency_s / 10)
        yield storage_series.IOS, ("nvme0n1", op), Signal(1e6, rate=200)
    yield storage_series.BUSY, ("nvme0n1",), Signal(5000, rate=0.02)
    yield storage_series.MOUNT_INFO, ("/scratch", "xfs", "/dev/nvme0n1", "nvme0n1", "rw"), Signal(1)
    yield storage_series.MOUNT_INFO, ("/results", "nfs4", "filer:/results", "", "rw"), Signal(1)
    yield storage_series.NFS_LATENCY, ("/results", "read"), Signal(0.002, noise=0.0002)
    yield storage_series.SIZE, ("/results",), Signal(100_000 * GIB)
    yield storage_series.AVAILABLE, ("/results",), Signal(40_000 * GIB)
    yield storage_series.READ_ONLY, ("/results",), Signal(0)
    yield storage_series.REACHABLE, ("/results",), Signal(1)
    yield storage_series.RESPONSE, ("/results",), Signal(0.001, noise=0.0001)
    yield storage_series.REFAULTS, (), Signal(1e6, rate=20)
    yield storage_series.RECLAIMED, (), Signal(1e6, rate=500)
    yield storage_series.MAJOR_FAULTS, (), Signal(1e5, rate=1)


def drive() -> Iterator[Course]:
    """The SMART log of that drive: a third of its endurance used in three years, at 100 MB/s."""
    controller = ("nvme0",)
    yield nvme.INFO, ("nvme0", "MZQL27T6HBLA", "S6CKNE0T", "GDC5602Q"), Signal(1)
    yield nvme.LIVE, controller, Signal(1)
    yield nvme.READABLE, controller, Signal(1)
    yield nvme.WEAR, controller, Signal(0.33)
    yield nvme.SPARE, controller, Signal(1)
    yield nvme.SPARE_LIMIT, controller, Signal(0.1)
    for warning in nvme.WARNINGS:
        yield nvme.WARNING, ("nvme0", warning), Signal(0)
    yield nvme.MEDIA_ERRORS, controller, Signal(0)
    yield nvme.WRITTEN, controller, Signal(9e15, rate=1e8)
    yield nvme.POWER_ON, controller, Signal(9e7, rate=1)


def slurm(job: str) -> Iterator[Course]:
    """The series of a node that Slurm has allocated to ``job``."""
    yield slurm_collector.UP, (), Signal(1)
    yield slurm_collector.AGE, (), Signal(10)
    for state in slurm_collector.STATES:
        yield slurm_collector.STATE, (state,), Signal(state == "allocated")
    for flag in slurm_collector.FLAGS:
        yield slurm_collector.FLAG, (flag,), Signal(0)
    yield slurm_collector.JOBS, (), Signal(1)
    yield slurm_collector.JOB, (job, "user", "gpu", "running"), Signal(1)
