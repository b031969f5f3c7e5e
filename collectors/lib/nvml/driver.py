"""The NVIDIA driver's management library. Only this module and ``mig`` import pynvml.

Its calls are here, but for those that ``nvml_fields`` and ``gpm`` make of the library themselves; what the answers mean
is in ``nvml_gpu``. No call blocks by design: nvmlDeviceGetPcieThroughput, which samples for 20 ms, is never made.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

import pynvml

from opsd.collectors.base import Metric
from opsd.collectors.lib.nvml import series

_MIB = 1 << 20
_NONE = 0xFFFFFFFF
"""The number of an instance where there is no MIG."""
_LIBRARY = "libnvidia-ml.so.1"

CallError = pynvml.NVMLError
"""The error of a driver call inside ``translated``; ``value`` is NVML's return code."""

GPU_IS_LOST: Final = pynvml.NVML_ERROR_GPU_IS_LOST
UNSUPPORTED: Final = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)
"""Return codes that mean: not on this GPU, with this driver or for this user, and not a moment later either."""


REGISTERED: Final = 3
"""The state in which the GPU is part of the fabric (NVML_GPU_FABRIC_STATE_COMPLETED) and its status means something."""

PROBLEMS: Final[Mapping[str, tuple[int, int]]] = {
    "degraded_bandwidth": (0, 0x3),
    "route_recovery": (2, 0x3),
    "route_unhealthy": (4, 0x3),
    "access_timeout_recovery": (6, 0x3),
    "incorrect_configuration": (8, 0xF),
}
"""Shift and mask of each problem in the health mask (NVML_GPU_FABRIC_HEALTH_MASK_* of nvml.h)."""

_UNKNOWN, _FALSE, _CONFIGURED = 0, 2, 1


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
def translated() -> Iterator[None]:
    """Raise NvmlError in place of CallError."""
    try:
        yield
    except pynvml.NVMLError as error:
        raise _KINDS.get(error.value, NvmlError)(str(error)) from error


def check(code: int) -> None:
    """Raise CallError if the return code of a call is not that of success."""
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)


class Call(NamedTuple):
    """A driver call and the metrics of the numbers it returns, in order; None is no number.

    ``extra`` are the labels after those of the GPU, for each metric in turn.
    """

    read: Callable[[Any], tuple[float | None, ...]]
    metrics: tuple[Metric, ...]
    extra: tuple[tuple[str, ...], ...] = ()


def _utilization(handle: Any) -> tuple[float, ...]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _memory(handle: Any) -> tuple[float, ...]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return memory.free / _MIB, memory.used / _MIB, memory.reserved / _MIB


class Use(NamedTuple):
    """Bytes of device memory of a process, and its MIG instance: the numbers of GPU and compute instance."""

    memory: int
    instance: tuple[int, int] | None


def processes(handle: Any) -> dict[int, Use]:
    """The share of each compute process of the GPU."""
    return {
        p.pid: Use(p.usedGpuMemory or 0, None if p.gpuInstanceId == _NONE else (p.gpuInstanceId, p.computeInstanceId))
        for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    }


def _reasons(handle: Any) -> tuple[float, ...]:
    mask = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return mask, mask


def _fabric_info(handle: Any) -> Any:
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return info


def fabric_domain(handle: Any) -> tuple[str, int] | None:
    """Cluster UUID and clique of the NVLink domain that a registered GPU shares with other nodes; None if it has none.

    GPUs whose fabric ends in their node have a UUID of zeros. Raises CallError.
    """
    try:
        info = _fabric_info(handle)
    except pynvml.NVMLError as error:
        if error.value in UNSUPPORTED:
            return None
        raise
    cluster = bytes(info.clusterUuid)
    return (str(UUID(bytes=cluster)), int(info.cliqueId)) if info.state == REGISTERED and any(cluster) else None


def common_domain(domains: Collection[tuple[str, int] | None]) -> str:
    """``CLUSTER.CLIQUE`` where all GPUs of a node are in that domain, "" otherwise: one that is not breaks a group."""
    found = set(domains)
    domain = found.pop() if len(found) == 1 else None
    return "" if domain is None else f"{domain[0]}.{domain[1]}"


def _fabric(handle: Any) -> tuple[float | None, ...]:
    info = _fabric_info(handle)
    if info.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return info.state, info.status if info.state == REGISTERED else None, *fabric_problems(info.healthMask)


def _limits(handle: Any) -> tuple[float, ...]:
    low, high = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    return low / 1e3, high / 1e3


def _threshold(kind: int, name: str) -> Call:
    read = pynvml.nvmlDeviceGetTemperatureThreshold
    return Call(lambda h: (read(h, kind),), (series.TEMPERATURE_LIMIT,), ((name,),))


def _clock_max(kind: int, name: str) -> Call:
    return Call(lambda h: (pynvml.nvmlDeviceGetMaxClockInfo(h, kind) * 1e6,), (series.CLOCK_MAX,), ((name,),))


EACH_TICK: Final = (
    Call(_utilization, (series.GPU_UTIL, series.MEM_COPY_UTIL)),
    Call(_memory, (series.FB_FREE, series.FB_USED, series.FB_RESERVED)),
    Call(lambda h: (pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU),), (series.GPU_TEMP,)),
    Call(lambda h: (pynvml.nvmlDeviceGetMarginTemperature(h),), (series.TEMPERATURE_MARGIN,)),
    Call(lambda h: (pynvml.nvmlDeviceGetPowerUsage(h) / 1e3,), (series.POWER_USAGE,)),
    Call(lambda h: (pynvml.nvmlDeviceGetPowerManagementLimit(h) / 1e3,), (series.POWER_LIMIT,)),
    Call(lambda h: (pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM),), (series.SM_CLOCK,)),
    Call(lambda h: (pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_MEM),), (series.MEM_CLOCK,)),
    Call(lambda h: (pynvml.nvmlDeviceGetEncoderUtilization(h)[0],), (series.ENC_UTIL,)),
    Call(lambda h: (pynvml.nvmlDeviceGetDecoderUtilization(h)[0],), (series.DEC_UTIL,)),
    Call(lambda h: (pynvml.nvmlDeviceGetPerformanceState(h),), (series.PERFORMANCE_STATE,)),
    Call(lambda h: (pynvml.nvmlDeviceGetPersistenceMode(h),), (series.PERSISTENCE,)),
    Call(lambda h: (pynvml.nvmlDeviceGetCurrPcieLinkGeneration(h),), (series.PCIE_GENERATION,)),
    Call(lambda h: (pynvml.nvmlDeviceGetCurrPcieLinkWidth(h),), (series.PCIE_WIDTH,)),
    Call(_reasons, (series.EVENT_REASONS, series.THROTTLE_REASONS)),
    Call(
        _fabric,
        (series.FABRIC_STATE, series.FABRIC_STATUS, *[series.FABRIC_PROBLEM] * len(PROBLEMS)),
        ((), (), *((problem,) for problem in PROBLEMS)),
    ),
)


def _sram(handle: Any) -> tuple[float, ...]:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    pynvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return (status.bThresholdExceeded,)


EACH_MINUTE: Final = (Call(_sram, (series.SRAM_THRESHOLD,)),)
"""What changes once in a GPU's life."""

ONCE: Final = (
    Call(lambda h: (pynvml.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1e3,), (series.POWER_LIMIT_DEFAULT,)),
    Call(_limits, (series.POWER_LIMIT_MIN, series.POWER_LIMIT_MAX)),
    Call(lambda h: (pynvml.nvmlDeviceGetMemoryInfo(h).total,), (series.MEMORY_TOTAL,)),
    Call(lambda h: (pynvml.nvmlDeviceGetMaxPcieLinkGeneration(h),), (series.PCIE_GENERATION_MAX,)),
    Call(lambda h: (pynvml.nvmlDeviceGetMaxPcieLinkWidth(h),), (series.PCIE_WIDTH_MAX,)),
    _clock_max(pynvml.NVML_CLOCK_SM, "sm"),
    _clock_max(pynvml.NVML_CLOCK_MEM, "memory"),
    _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN, "shutdown"),
    _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, "slowdown"),
    _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX, "gpu_max"),
    _threshold(pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX, "memory_max"),
)


class DeviceUse(NamedTuple):
    """What runs on a GPU: percent of the time with a kernel, and with its memory or video engines in use.

    ``processes`` are the same two numbers of the processes that did anything; None where the driver does not tell.
    """

    holders: frozenset[int]
    kernels: int
    work: int
    processes: Mapping[int, tuple[int, int]] | None


def device_use(index: int, since: float) -> DeviceUse | None:
    """The use of a GPU since ``since``, in seconds since the epoch; None if it does not tell."""
    with contextlib.suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        kernels, memory = (int(percent) for percent in _utilization(handle))
        return DeviceUse(frozenset(processes(handle)), kernels, memory, _process_use(handle, since))
    return None


def _process_use(handle: Any, since: float) -> dict[int, tuple[int, int]] | None:
    found: dict[int, tuple[int, int]] = {}
    try:
        for sample in pynvml.nvmlDeviceGetProcessUtilization(handle, int(since * 1e6)):
            kernels, work = found.get(sample.pid, (0, 0))
            busiest = max(sample.memUtil, sample.encUtil, sample.decUtil)
            found[sample.pid] = max(kernels, sample.smUtil), max(work, busiest)
    except pynvml.NVMLError as error:
        return {} if error.value in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND) else None
    return found


def identify(handle: Any, index: int) -> series.Identity:
    """The identity of the GPU. Raises CallError."""
    return series.Identity(
        index=index,
        uuid=as_text(pynvml.nvmlDeviceGetUUID(handle)),
        pci_bus_id=as_text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        model=as_text(pynvml.nvmlDeviceGetName(handle)),
    )


def vbios_version(handle: Any) -> str:
    """Version of the GPU's firmware. Raises CallError."""
    return as_text(pynvml.nvmlDeviceGetVbiosVersion(handle))


def fabric_problems(health: int) -> tuple[bool | None, ...]:
    """Whether the GPU has each of ``PROBLEMS``; None where the hardware does not tell, as an H100 for most.

    A problem is 1 and its absence 2, but for the configuration: 1 is a good one and the rest say what is wrong with it.
    """
    answers = []
    for name, (shift, mask) in PROBLEMS.items():
        value = health >> shift & mask
        good = _CONFIGURED if name == "incorrect_configuration" else _FALSE
        answers.append(None if value == _UNKNOWN else value != good)
    return tuple(answers)


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
        with translated():
            pynvml.nvmlInit()
        self._events: Any = None
        self._indices: dict[int | None, int] = {}
        try:
            with translated():
                with contextlib.suppress(pynvml.NVMLError):  # optional: the kernel log has every Xid too
                    self._events = pynvml.nvmlEventSetCreate()
                self.version = as_text(pynvml.nvmlSystemGetDriverVersion())
                self.count = int(pynvml.nvmlDeviceGetCount())
        except NvmlError:
            self.close()
            raise
        self.library = ctypes.CDLL(_LIBRARY)
        self.simulated = hasattr(self.library, "opsd_simulated_nvml")

    def close(self) -> None:
        """End the session; never fails."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def handle(self, index: int) -> Any:
        """The driver's handle of a GPU, whose Xids from now on are delivered to ``xids``. Raises CallError."""
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._indices[_address(handle)] = index
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        return handle

    def xids(self) -> Iterator[tuple[int, int, int | None]]:
        """GPU index, code and GPU instance, None without MIG, of every Xid since the last call.

        Also of GPUs that answer nothing any more.
        """
        while self._events is not None:
            try:
                event = pynvml.nvmlEventSetWait(self._events, 0)
            except pynvml.NVMLError:
                return
            instance = None if event.gpuInstanceId == _NONE else int(event.gpuInstanceId)
            yield self._indices[_address(event.device)], int(event.eventData), instance

    def set_power_limit(self, gpu: int | str, watts: float) -> None:
        """Set the board power limit of the GPU with this index or UUID. Raises NvmlError."""
        with translated():
            by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
            handle = by_index(gpu) if isinstance(gpu, int) else by_uuid(gpu.encode())
            low, high = _limits(handle)
            if not low <= watts <= high:
                raise NvmlError(f"it must be between {low:g} and {high:g} W")
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, round(watts * 1e3))


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def as_text(value: str | bytes) -> str:
    """What pynvml returns, which differs between its releases."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
