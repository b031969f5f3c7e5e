"""The MIG instances of one GPU: what they are, whose processes run on them and how much of their memory is used.

NVML has no utilization of an instance (nvmlDeviceGetUtilizationRates); nothing is said about it. The metrics have the
label of dcgm-exporter for the number of a GPU instance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, Final, NamedTuple

import pynvml

from opsd.collectors.base import Metric, Sample
from opsd.collectors.lib.nvml import driver
from opsd.collectors.lib.nvml.driver import UNSUPPORTED, CallError, as_text

LIST_S: Final = 5.0
"""Seconds between two looks at which instances there are."""

_LABELS: Final = ("gpu", "UUID", "GPU_I_ID", "compute_instance")
INFO = Metric("opsd_mig_info", "A MIG instance.", "info", labels=(*_LABELS, "mig_uuid", "GPU_I_PROFILE"), kept=False)
MEMORY = Metric("opsd_mig_memory_bytes", "Memory of a MIG instance.", unit="bytes", labels=_LABELS)
MEMORY_USED = Metric("opsd_mig_memory_used_bytes", "Memory of a MIG instance in use.", unit="bytes", labels=_LABELS)
PROCESSES = Metric("opsd_mig_processes", "Compute processes on a MIG instance.", labels=_LABELS)
METRICS: Final = (INFO, MEMORY, MEMORY_USED, PROCESSES)
LABELS: Final = {
    "GPU_I_ID": "GPU instances of a GPU, 7 at most",
    "compute_instance": "compute instances of a GPU instance, mostly one",
    "mig_uuid": "one per MIG instance",
    "GPU_I_PROFILE": "one per MIG instance, as 1g.10gb",
}


class _Device(NamedTuple):
    """A MIG instance by its own handle, with the numbers of its GPU and compute instance, its UUID and name."""

    handle: Any
    gpu: int
    compute: int
    uuid: str
    name: str


class _Known(NamedTuple):
    device: _Device
    labels: tuple[str, ...]
    info: Sample


class MigReader:
    """The instances of the GPU with this handle, ``index`` and ``uuid``.

    ``enabled`` is whether it has MIG switched on, None if it does not know MIG.
    """

    enabled: bool | None = False

    def __init__(self, handle: Any, index: int, uuid: str) -> None:
        self._handle, self._gpu = handle, (str(index), uuid)
        self._listed = -math.inf
        self._known: tuple[_Known, ...] = ()

    @property
    def gpu_instances(self) -> frozenset[int]:
        """The numbers of the GPU instances that there are."""
        return frozenset(known.device.gpu for known in self._known)

    def look_again(self) -> None:
        """List the instances at the next ``read`` rather than after ``LIST_S``."""
        self._listed = -math.inf

    def read(self, now: float, uses: Collection[driver.Use]) -> Iterator[Sample]:
        """What is known of each instance at the monotonic second ``now``; ``uses`` are those of the GPU's processes.

        Raises CallError if the GPU does not answer.
        """
        if self.enabled is not None and now - self._listed >= LIST_S:
            self._listed = now
            self._known = tuple(self._list())
        for known in self._known:
            try:
                total, used = _memory(known.device.handle)
            except CallError as error:
                if error.value == driver.GPU_IS_LOST:
                    raise
                continue  # destroyed since it was listed
            yield known.info
            yield Sample(MEMORY, total, known.labels)
            yield Sample(MEMORY_USED, used, known.labels)
            place = (known.device.gpu, known.device.compute)
            yield Sample(PROCESSES, sum(use.instance == place for use in uses), known.labels)

    def _list(self) -> Iterator[_Known]:
        try:
            self.enabled = _enabled(self._handle)
        except CallError as error:
            if error.value not in UNSUPPORTED:
                raise
            self.enabled = None
        if not self.enabled:
            return
        for device in _devices(self._handle):
            labels = (*self._gpu, str(device.gpu), str(device.compute))
            info = Sample(INFO, 1.0, (*labels, device.uuid, device.name.rpartition("MIG ")[2]))
            yield _Known(device, labels, info)


def _enabled(handle: Any) -> bool:
    """Whether MIG is switched on. Raises CallError."""
    return bool(pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE)


def _devices(handle: Any) -> Iterator[_Device]:
    """The MIG instances of a GPU. Raises CallError if the GPU does not answer."""
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            yield _Device(
                found,
                pynvml.nvmlDeviceGetGpuInstanceId(found),
                pynvml.nvmlDeviceGetComputeInstanceId(found),
                as_text(pynvml.nvmlDeviceGetUUID(found)),
                as_text(pynvml.nvmlDeviceGetName(found)),
            )
        except CallError as error:
            if error.value == driver.GPU_IS_LOST:
                raise
            # No instance has this index, or it is being destroyed.


def _memory(handle: Any) -> tuple[int, int]:
    """Bytes of a MIG instance's memory, and those in use. Raises CallError."""
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return memory.total, memory.used
