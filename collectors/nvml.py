"""NVIDIA GPUs through NVML. The only module that imports pynvml.

Every driver call that reads something is here; what its answers mean is in ``nvml_series`` and ``throttle``. Nothing
here blocks by design: nvmlDeviceGetPcieThroughput, which samples for 20 ms, is never called.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import pynvml

from collectors import nvml_series as series
from collectors.base import Event, GpuFact, Metric, NoData, Reading, Sample
from collectors.throttle import REASONS, ThrottleClock

_MIB = 1 << 20
_LIBRARY = "libnvidia-ml.so.1"
_SESSION_OVER = (
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
)
_UNSUPPORTED = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
)


class NvmlError(Exception):
    """The driver refused or failed; the message says what was wanted and why it failed."""


class _Call(NamedTuple):
    """A driver call and the metrics of the numbers it returns, in order."""

    read: Callable[[Any], tuple[float, ...]]
    metrics: tuple[Metric, ...]
    extra: tuple[str, ...] = ()


def _utilization(handle: Any) -> tuple[float, ...]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _memory(handle: Any) -> tuple[float, ...]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return memory.free / _MIB, memory.used / _MIB, memory.reserved / _MIB


def _processes(handle: Any) -> tuple[float, ...]:
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return len(processes), sum(process.usedGpuMemory or 0 for process in processes)


def _limits(handle: Any) -> tuple[float, ...]:
    low, high = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    return low / 1e3, high / 1e3


def _threshold(kind: int, name: str) -> _Call:
    return _Call(lambda h: (pynvml.nvmlDeviceGetTemperatureThreshold(h, kind),), (series.TEMPERATURE_LIMIT,), (name,))


def _clock_max(kind: int, name: str) -> _Call:
    return _Call(lambda h: (pynvml.nvmlDeviceGetMaxClockInfo(h, kind) * 1e6,), (series.CLOCK_MAX,), (name,))


_EACH_TICK: Final = (
    _Call(_utilization, (series.GPU_UTIL, series.MEM_COPY_UTIL)),
    _Call(_memory, (series.FB_FREE, series.FB_USED, series.FB_RESERVED)),
    _Call(_processes, (series.PROCESSES, series.PROCESS_MEMORY)),
    _Call(lambda h: (pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU),), (series.GPU_TEMP,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetMarginTemperature(h),), (series.TEMPERATURE_MARGIN,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetPowerUsage(h) / 1e3,), (series.POWER_USAGE,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetPowerManagementLimit(h) / 1e3,), (series.POWER_LIMIT,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM),), (series.SM_CLOCK,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_MEM),), (series.MEM_CLOCK,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetEncoderUtilization(h)[0],), (series.ENC_UTIL,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetDecoderUtilization(h)[0],), (series.DEC_UTIL,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetPerformanceState(h),), (series.PERFORMANCE_STATE,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetPersistenceMode(h),), (series.PERSISTENCE,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetCurrPcieLinkGeneration(h),), (series.PCIE_GENERATION,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetCurrPcieLinkWidth(h),), (series.PCIE_WIDTH,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetCurrentClocksEventReasons(h),), (series.EVENT_REASONS,)),
)

_ONCE: Final = (
    _Call(lambda h: (pynvml.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1e3,), (series.POWER_LIMIT_DEFAULT,)),
    _Call(_limits, (series.POWER_LIMIT_MIN, series.POWER_LIMIT_MAX)),
    _Call(lambda h: (pynvml.nvmlDeviceGetMemoryInfo(h).total,), (series.MEMORY_TOTAL,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetMaxPcieLinkGeneration(h),), (series.PCIE_GENERATION_MAX,)),
    _Call(lambda h: (pynvml.nvmlDeviceGetMaxPcieLinkWidth(h),), (series.PCIE_WIDTH_MAX,)),
    _clock_max(pynvml.NVML_CLOCK_SM, "sm"),
    _clock_max(pynvml.NVML_CLOCK_MEM, "memory"),
    _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN, "shutdown"),
    _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, "slowdown"),
    _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX, "gpu_max"),
    _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX, "memory_max"),
)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class _Bound(NamedTuple):
    """A driver call and the series, with their label values, that its numbers go to."""

    read: Callable[[Any], tuple[float, ...]]
    series: tuple[tuple[Metric, tuple[str, ...]], ...]


class _Gpu:
    """One GPU of an open session. What turns out to be unsupported is not asked for again."""

    def __init__(self, index: int, hostname: str, simulated: bool) -> None:
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.identity = series.Identity(
            index=index,
            uuid=_text(pynvml.nvmlDeviceGetUUID(self.handle)),
            pci_bus_id=_text(pynvml.nvmlDeviceGetPciInfo(self.handle).busId),
            model=_text(pynvml.nvmlDeviceGetName(self.handle)),
        )
        self._hostname = hostname
        plan = series.field_plan(self._links())
        self._wanted = [*plan]
        self._field_series = {
            key: (target.metric, target.scale, self._labels(target.metric, *target.extra))
            for key, target in plan.items()
            if target is not None
        }
        self._calls = [self._bind(call) for call in _EACH_TICK]
        self._static = (*self._ask([self._bind(call) for call in _ONCE]), self._info(simulated))
        self._nvlink_labels = self._labels(series.NVLINK_BANDWIDTH)
        self._throttle_labels = {reason: self._labels(series.THROTTLE, reason) for reason in REASONS}
        self._throttle = ThrottleClock()

    def read(self, now: float) -> list[Sample]:
        """Everything the GPU tells at ``now``, in seconds since boot. Raises NVMLError if it does not answer."""
        samples = self._ask(self._calls)
        mask = next((int(sample.value) for sample in samples if sample.metric is series.EVENT_REASONS), None)
        fields = self._fields()
        samples += series.field_samples(fields, self._field_series)
        if (kib := series.nvlink_kib(fields)) is not None:
            samples.append(Sample(series.NVLINK_BANDWIDTH, kib, self._nvlink_labels))
        for reason, seconds in self._throttle.update(now, mask, series.throttle_counters(fields)).items():
            samples.append(Sample(series.THROTTLE, seconds, self._throttle_labels[reason]))
        samples += self._static
        return samples

    def _labels(self, metric: Metric, *extra: str) -> tuple[str, ...]:
        return self.identity.labels(metric, self._hostname, *extra)

    def _bind(self, call: _Call) -> _Bound:
        return _Bound(call.read, tuple((metric, self._labels(metric, *call.extra)) for metric in call.metrics))

    def _links(self) -> int:
        self._wanted = [(series.LINK_COUNT, 0)]
        return next((int(series.number(field)) for field in self._fields()), 0)

    def _info(self, simulated: bool) -> Sample:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        vbios = _text(pynvml.nvmlDeviceGetVbiosVersion(self.handle))
        what = (self.identity.pci_bus_id, self.identity.model, driver, vbios, "yes" if simulated else "no")
        return Sample(series.INFO, 1.0, self._labels(series.INFO, *what))

    def _ask(self, calls: list[_Bound]) -> list[Sample]:
        """The samples of ``calls``; unsupported ones are removed from the list."""
        samples = []
        for call in [*calls]:
            try:
                numbers = call.read(self.handle)
            except pynvml.NVMLError as error:
                if error.value not in _UNSUPPORTED:
                    raise
                calls.remove(call)
            else:
                for (metric, labels), value in zip(call.series, numbers, strict=True):
                    samples.append(Sample(metric, value, labels))
        return samples

    def _fields(self) -> list[series.FieldValue]:
        """All wanted fields that have an answer, in one driver call; unsupported ones are no longer wanted."""
        answers = [*series.field_values(memoryview(pynvml.nvmlDeviceGetFieldValues(self.handle, self._wanted)))]
        refused = {(field.id, field.scope) for field in answers if field.result in _UNSUPPORTED}
        if refused:
            self._wanted = [key for key in self._wanted if key not in refused]
        if any(field.result == pynvml.NVML_ERROR_GPU_IS_LOST for field in answers):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return [field for field in answers if field.result == pynvml.NVML_SUCCESS]


class _Session:
    """Everything that ends with nvmlShutdown: the GPUs, or why they do not answer, and the queue of Xids."""

    def __init__(self, hostname: str, simulated: bool, known: Mapping[int, series.Identity]) -> None:
        self.simulated = simulated
        self.gpus: dict[int, _Gpu] = {}
        self.lost: dict[int, str] = {}
        self._xids: dict[int, int] = {}
        self._hostname = hostname
        self._identities = dict(known)
        self._events = pynvml.nvmlEventSetCreate()
        for index in range(pynvml.nvmlDeviceGetCount()):
            self._attach(index)

    @property
    def identities(self) -> Mapping[int, series.Identity]:
        """Every GPU the driver counts; one that was never seen answering has only an index."""
        return self._identities

    def _attach(self, index: int) -> None:
        try:
            gpu = _Gpu(index, self._hostname, self.simulated)
        except pynvml.NVMLError as error:
            if error.value in _SESSION_OVER:
                raise
            self.lost[index] = str(error)
            self._identities.setdefault(index, series.Identity(index, "", "", ""))
            return
        self.gpus[index] = gpu
        self._identities[index] = gpu.identity
        with contextlib.suppress(pynvml.NVMLError):  # Xids come from the kernel log too
            pynvml.nvmlDeviceRegisterEvents(gpu.handle, pynvml.nvmlEventTypeXidCriticalError, self._events)

    def read(self, now: float) -> list[Sample]:
        """The samples of all GPUs. One that does not answer goes to ``lost`` and is asked again next time."""
        samples: list[Sample] = []
        for index, identity in self._identities.items():
            samples += self._read_gpu(index, now)
            up = 0.0 if index in self.lost else 1.0
            samples.append(Sample(series.UP, up, identity.labels(series.UP, self._hostname)))
            if identity.uuid:
                labels = identity.labels(series.XID_ERRORS, self._hostname)
                samples.append(Sample(series.XID_ERRORS, self._xids.get(index, 0), labels))
        return samples

    def _read_gpu(self, index: int, now: float) -> list[Sample]:
        if index not in self.gpus:
            return []
        try:
            samples = self.gpus[index].read(now)
        except pynvml.NVMLError as error:
            if error.value in _SESSION_OVER:
                raise
            self.lost[index] = str(error)
            return []
        self.lost.pop(index, None)
        return samples

    def xids(self, at: float) -> Iterator[Event]:
        """Xids delivered since the last call, stamped with the wall second ``at``."""
        while True:
            try:
                event = pynvml.nvmlEventSetWait(self._events, 0)
            except pynvml.NVMLError as error:
                if error.value in _SESSION_OVER:
                    raise
                return
            code, index = int(event.eventData), self._index(event.device)
            if index is not None:
                self._xids[index] = code
                data = {"gpu": index, "uuid": self._identities[index].uuid, "xid": code, "source": "nvml"}
                yield Event("xid", at, f"Xid {code} on GPU {index}", data)

    def _index(self, device: Any) -> int | None:
        address = ctypes.cast(device, ctypes.c_void_p).value
        handles = ((index, ctypes.cast(gpu.handle, ctypes.c_void_p).value) for index, gpu in self.gpus.items())
        return next((index for index, handle in handles if handle == address), None)

    def facts(self) -> tuple[GpuFact, ...]:
        """The identity of every GPU and why it does not answer, if so."""
        return tuple(
            GpuFact(i.index, i.uuid, i.pci_bus_id, i.model, self.simulated, self.lost.get(i.index))
            for i in self._identities.values()
        )


class NvmlCollector:
    """Health and load of the node's NVIDIA GPUs.

    ``library`` is the path of another ``libnvidia-ml.so.1`` than the system's; a process can use one only. ``clock`` is
    in seconds since boot, as time.monotonic on Linux. While a GPU is lost or the driver was reloaded the session is
    opened anew, at most every ``reopen_s``.
    """

    name = "nvml"
    metrics: tuple[Metric, ...] = series.METRICS

    def __init__(
        self,
        library: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        hostname: str | None = None,
        reopen_s: float = 60.0,
    ) -> None:
        self._library = library
        self._clock = clock
        self._wall = wall
        self._hostname = hostname or os.uname().nodename
        self._reopen_s = reopen_s
        self._session: _Session | None = None
        self._opened = 0.0
        self._known: Mapping[int, series.Identity] = {}

    def collect(self) -> Reading | NoData:
        """Read all GPUs. Raises NvmlError if the driver cannot be initialised or its session has ended."""
        now = self._clock()
        if self._session is not None and self._session.lost and now - self._opened >= self._reopen_s:
            self._close()
        try:
            if self._session is None:
                self._session = self._open(now)
            if not self._session.identities:
                self._close()
                return NoData("the NVIDIA driver sees no GPU on this node")
            samples = self._session.read(now)
            events = tuple(self._session.xids(self._wall()))
            return Reading(tuple(samples), events, self._session.facts())
        except pynvml.NVMLError as error:
            self._close()
            if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                return NoData(f"no NVIDIA driver library ({_LIBRARY}) on this node")
            if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
                return NoData("the NVIDIA driver is not loaded")
            raise NvmlError(f"the NVIDIA driver's management library failed: {error}") from error

    def _open(self, now: float) -> _Session:
        simulated = _initialise(self._library)
        session = _Session(self._hostname, simulated, self._known)
        self._opened, self._known = now, session.identities
        return session

    def _close(self) -> None:
        self._session = None
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class PowerControl:
    """Sets power limits of GPUs; apart from the collector, which only ever reads."""

    def __init__(self, library: str | None = None) -> None:
        self._library = library

    def set_power_limit(self, gpu: int | str, watts: float) -> None:
        """Set the board power limit of the GPU with this index or UUID, until it is reset. Needs root.

        Raises NvmlError if the driver is not there, the GPU is unknown or lost, permission is missing, or ``watts`` is
        outside the limits of the board.
        """
        try:
            _initialise(self._library)
            try:
                self._set(gpu, watts)
            finally:
                pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
                raise NvmlError(
                    f"the power limit of GPU {gpu} can only be set by root; run the agent as root"
                ) from error
            raise NvmlError(f"the power limit of GPU {gpu} was not set to {watts:g} W: {error}") from error

    def _set(self, gpu: int | str, watts: float) -> None:
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handle = by_index(gpu) if isinstance(gpu, int) else by_uuid(gpu.encode())
        low, high = (limit / 1e3 for limit in pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle))
        if not low <= watts <= high:
            raise NvmlError(f"the power limit of GPU {gpu} must be between {low:g} and {high:g} W, not {watts:g} W")
        pynvml.nvmlDeviceSetPowerManagementLimit(handle, round(watts * 1e3))


def _initialise(library: str | None) -> bool:
    """Load the library, open a session, and say whether the GPUs are simulated.

    The library at a path of its own has to be loaded first: the loader then finds it by its name when pynvml asks.
    """
    if library is not None:
        try:
            ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(f"the NVIDIA library {library} cannot be loaded: {error}") from error
    pynvml.nvmlInit()
    return hasattr(ctypes.CDLL(_LIBRARY), "opsd_simulated_nvml")
