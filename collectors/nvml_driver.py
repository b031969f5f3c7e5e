"""The NVIDIA driver's management library. The only module that imports pynvml.

Every driver call is here; what the answers mean is in ``nvml_fields``, ``nvml_series`` and ``throttle``. No call blocks
by design: nvmlDeviceGetPcieThroughput, which samples for 20 ms, is never made.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pynvml

from collectors import nvml_fields as fields
from collectors import nvml_series as series
from collectors.base import Metric, Sample
from collectors.throttle import REASONS, ThrottleClock

_MIB = 1 << 20
_LIBRARY = "libnvidia-ml.so.1"
_UNSUPPORTED = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)


class NvmlError(Exception):
    """The driver refused or failed; the message says why."""


class NoDriverError(NvmlError):
    """There is no NVIDIA driver on this node, or it is not loaded."""


class SessionOverError(NvmlError):
    """The driver was reloaded: a new session has to be opened."""


class NoPermissionError(NvmlError):
    """The call needs root."""


_KINDS: Final = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: NoDriverError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: NoDriverError,
    pynvml.NVML_ERROR_UNINITIALIZED: SessionOverError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: SessionOverError,
    pynvml.NVML_ERROR_NO_PERMISSION: NoPermissionError,
}


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        raise _KINDS.get(error.value, NvmlError)(str(error)) from error


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


class _Bound(NamedTuple):
    """A driver call and the series, with their label values, that its numbers go to."""

    read: Callable[[Any], tuple[float, ...]]
    series: tuple[tuple[Metric, tuple[str, ...]], ...]


class Gpu:
    """One GPU of a session. What turns out to be unsupported is not asked for again."""

    def __init__(self, library: ctypes.CDLL, index: int, hostname: str) -> None:
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.identity = series.Identity(
            index=index,
            uuid=_text(pynvml.nvmlDeviceGetUUID(self.handle)),
            pci_bus_id=_text(pynvml.nvmlDeviceGetPciInfo(self.handle).busId),
            model=_text(pynvml.nvmlDeviceGetName(self.handle)),
        )
        self.vbios = self._vbios()
        self._hostname = hostname
        links = self._link_count(library)
        self._fields = fields.FieldReader(library.nvmlDeviceGetFieldValues, self.handle, self._routes(links))
        self._calls = [self._bind(call) for call in _EACH_TICK]
        self._static = self._ask([self._bind(call) for call in _ONCE])
        self._bandwidth = self._labels(series.NVLINK_BANDWIDTH)
        self._link_errors = [self._labels(series.NVLINK_LINK_ERRORS, str(link)) for link in range(links)]
        self._reasons = {reason: self._labels(series.THROTTLE, reason) for reason in REASONS}
        self._throttle = ThrottleClock()

    def read(self, now: float) -> list[Sample]:
        """Everything the GPU tells at ``now``, in seconds since boot. Raises NvmlError if it does not answer."""
        with _translated():
            samples = self._ask(self._calls)
            of_fields, rest = self._ask_fields()
        if not samples:
            raise NvmlError("the driver knows the GPU but answers no call about it")
        mask = next((int(sample.value) for sample in samples if sample.metric is series.EVENT_REASONS), None)
        samples += of_fields
        if (kib := fields.nvlink_kib(of_fields)) is not None:
            samples.append(Sample(series.NVLINK_BANDWIDTH, kib, self._bandwidth))
        for link, errors in fields.link_errors(rest).items():
            samples.append(Sample(series.NVLINK_LINK_ERRORS, errors, self._link_errors[link]))
        for reason, seconds in self._throttle.update(now, mask, fields.throttle_counters(rest)).items():
            samples.append(Sample(series.THROTTLE, seconds, self._reasons[reason]))
        samples += self._static
        return samples

    def _labels(self, metric: Metric, *extra: str) -> tuple[str, ...]:
        return self.identity.labels(metric, self._hostname, *extra)

    def _vbios(self) -> str:
        try:
            return _text(pynvml.nvmlDeviceGetVbiosVersion(self.handle))
        except pynvml.NVMLError as error:
            if error.value not in _UNSUPPORTED:
                raise
            return ""

    def _link_count(self, library: ctypes.CDLL) -> int:
        reader = fields.FieldReader(library.nvmlDeviceGetFieldValues, self.handle, {(fields.LINK_COUNT, 0): None})
        _, _, answer = reader.read()
        return next((int(fields.number(field.type, field.bits)) for field in answer if not field.result), 0)

    def _routes(self, links: int) -> dict[fields.FieldKey, fields.Route | None]:
        return {
            key: target and (target.metric, target.scale, self._labels(target.metric, *target.extra))
            for key, target in fields.field_plan(links).items()
        }

    def _bind(self, call: _Call) -> _Bound:
        return _Bound(call.read, tuple((metric, self._labels(metric, *call.extra)) for metric in call.metrics))

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

    def _ask_fields(self) -> tuple[list[Sample], list[fields.FieldValue]]:
        code, samples, rest = self._fields.read()
        if code in _UNSUPPORTED:
            return [], []
        lost = any(field.result == pynvml.NVML_ERROR_GPU_IS_LOST for field in rest)
        if code != pynvml.NVML_SUCCESS or lost:
            raise pynvml.NVMLError(code or pynvml.NVML_ERROR_GPU_IS_LOST)
        if unsupported := [(field.id, field.scope) for field in rest if field.result in _UNSUPPORTED]:
            self._fields.forget(unsupported)
        return samples, rest


class Driver:
    """An open session with the driver: NVML of the system, or the library at ``path``.

    A process can use one library only. Opening raises NoDriverError where there is no driver, NvmlError if it fails.
    """

    def __init__(self, path: str | None = None) -> None:
        if path is not None:
            # Loaded by its path first, it is what the loader finds when pynvml asks for the library by name.
            try:
                ctypes.CDLL(path)
            except OSError as error:
                raise NvmlError(f"the NVIDIA library {path} cannot be loaded: {error}") from error
        with _translated():
            pynvml.nvmlInit()
        self._events: Any = None
        self._indices: dict[int | None, int] = {}
        try:
            with _translated():
                with contextlib.suppress(pynvml.NVMLError):  # optional: the kernel log has every Xid too
                    self._events = pynvml.nvmlEventSetCreate()
                self.version = _text(pynvml.nvmlSystemGetDriverVersion())
                self.count = int(pynvml.nvmlDeviceGetCount())
        except NvmlError:
            self.close()
            raise
        self._library = ctypes.CDLL(_LIBRARY)
        self.simulated = hasattr(self._library, "opsd_simulated_nvml")

    def close(self) -> None:
        """End the session; never fails."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def gpu(self, index: int, hostname: str) -> Gpu:
        """The GPU ``index``, its Xids from now on delivered to ``xids``. Raises NvmlError if it does not answer."""
        with _translated():
            gpu = Gpu(self._library, index, hostname)
            self._indices[_address(gpu.handle)] = index
            if self._events is not None:
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlDeviceRegisterEvents(gpu.handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            return gpu

    def xids(self) -> Iterator[tuple[int, int]]:
        """GPU index and code of every Xid since the last call, also of GPUs that answer nothing any more."""
        while self._events is not None:
            try:
                event = pynvml.nvmlEventSetWait(self._events, 0)
            except pynvml.NVMLError:
                return
            yield self._indices[_address(event.device)], int(event.eventData)

    def set_power_limit(self, gpu: int | str, watts: float) -> None:
        """Set the board power limit of the GPU with this index or UUID. Raises NvmlError."""
        with _translated():
            by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
            handle = by_index(gpu) if isinstance(gpu, int) else by_uuid(gpu.encode())
            low, high = _limits(handle)
            if not low <= watts <= high:
                raise NvmlError(f"it must be between {low:g} and {high:g} W")
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, round(watts * 1e3))


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
