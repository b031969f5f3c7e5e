"""The series of the NVML collector: names, labels, and the pure functions from driver answers to samples.

Names that begin with ``DCGM_FI_`` and their labels are those of dcgm-exporter's default counters, so that dashboards
and alerts written for it work unchanged. Their units are dcgm-exporter's too and stand in the help text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from collectors.base import Metric, MetricKind, Sample

_DCGM_LABELS = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname")
_GPU_LABELS = ("gpu", "UUID")


def _dcgm(name: str, help_text: str, kind: MetricKind = "gauge") -> Metric:
    return Metric(f"DCGM_FI_DEV_{name}", help_text, kind, labels=_DCGM_LABELS)


def _gpu(name: str, help_text: str, unit: str = "", *labels: str, kind: MetricKind = "gauge") -> Metric:
    return Metric(f"opsd_gpu_{name}", help_text, kind, unit, (*_GPU_LABELS, *labels))


SM_CLOCK = _dcgm("SM_CLOCK", "SM clock (MHz).")
MEM_CLOCK = _dcgm("MEM_CLOCK", "Memory clock (MHz).")
MEMORY_TEMP = _dcgm("MEMORY_TEMP", "Memory temperature (degrees Celsius).")
GPU_TEMP = _dcgm("GPU_TEMP", "GPU temperature (degrees Celsius).")
POWER_USAGE = _dcgm("POWER_USAGE", "Board power draw (W).")
ENERGY = _dcgm("TOTAL_ENERGY_CONSUMPTION", "Energy used since the driver was loaded (mJ).", "untyped")
PCIE_REPLAYS = _dcgm("PCIE_REPLAY_COUNTER", "PCIe replays since the driver was loaded.", "untyped")
GPU_UTIL = _dcgm("GPU_UTIL", "Share of time with at least one kernel running (percent).")
MEM_COPY_UTIL = _dcgm("MEM_COPY_UTIL", "Share of time with device memory being read or written (percent).")
ENC_UTIL = _dcgm("ENC_UTIL", "Encoder utilization (percent).")
DEC_UTIL = _dcgm("DEC_UTIL", "Decoder utilization (percent).")
XID_ERRORS = _dcgm("XID_ERRORS", "Last Xid since the collector started, 0 if none.")
FB_FREE = _dcgm("FB_FREE", "Framebuffer memory free (MiB).")
FB_USED = _dcgm("FB_USED", "Framebuffer memory used (MiB).")
FB_RESERVED = _dcgm("FB_RESERVED", "Framebuffer memory reserved by the driver (MiB).")
NVLINK_BANDWIDTH = _dcgm("NVLINK_BANDWIDTH_TOTAL", "Data sent and received over all NVLinks (KiB).", "untyped")
REMAPPED_UNCORRECTABLE = _dcgm("UNCORRECTABLE_REMAPPED_ROWS", "Rows remapped after uncorrectable errors.", "untyped")
REMAPPED_CORRECTABLE = _dcgm("CORRECTABLE_REMAPPED_ROWS", "Rows remapped after correctable errors.", "untyped")
REMAP_FAILURE = _dcgm("ROW_REMAP_FAILURE", "1 if remapping a row has failed.")
EVENT_REASONS = _dcgm("CLOCKS_EVENT_REASONS", "Bit mask of the reasons that hold the clocks back right now.")

UP = _gpu("up", "1 if the GPU answers its driver, 0 if it is lost.")
INFO = _gpu(
    "info", "What the GPU is.", "", "pci_bus_id", "model", "driver_version", "vbios_version", "simulated", kind="info"
)
THROTTLE = _gpu("throttle_seconds_total", "Time the clocks were held back.", "seconds", "reason", kind="counter")
POWER_LIMIT = _gpu("power_limit_watts", "Board power limit in force.", "watts")
POWER_LIMIT_DEFAULT = _gpu("power_limit_default_watts", "Board power limit after a reset.", "watts")
POWER_LIMIT_MIN = _gpu("power_limit_min_watts", "Lowest board power limit that can be set.", "watts")
POWER_LIMIT_MAX = _gpu("power_limit_max_watts", "Highest board power limit that can be set.", "watts")
TEMPERATURE_LIMIT = _gpu(
    "temperature_threshold_celsius", "Temperature at which the driver or hardware acts.", "celsius", "threshold"
)
TEMPERATURE_MARGIN = _gpu("temperature_margin_celsius", "Degrees left until the GPU slows itself down.", "celsius")
MEMORY_TOTAL = _gpu("memory_total_bytes", "Device memory installed.", "bytes")
CLOCK_MAX = _gpu("clock_max_hertz", "Highest clock.", "hertz", "clock")
ECC_ERRORS = _gpu(
    "ecc_errors_total", "ECC errors: volatile since the driver was loaded, aggregate since manufacture.", "",
    "type", "counter", kind="counter",
)  # fmt: skip
REMAP_PENDING = _gpu("row_remap_pending", "1 if a row remapping waits for a GPU reset.")
RETIRED_PAGES = _gpu("retired_pages", "Pages retired (GPUs before Ampere).", "", "cause")
RETIRED_PENDING = _gpu("retired_pages_pending", "1 if page retirements wait for a reboot (GPUs before Ampere).")
PCIE_GENERATION = _gpu("pcie_link_generation", "PCIe generation the link runs at; low at idle is normal.")
PCIE_GENERATION_MAX = _gpu("pcie_link_generation_max", "Highest PCIe generation of GPU and slot together.")
PCIE_WIDTH = _gpu("pcie_link_width", "PCIe lanes in use.")
PCIE_WIDTH_MAX = _gpu("pcie_link_width_max", "Most PCIe lanes of GPU and slot together.")
NVLINK_UP = _gpu("nvlink_up", "1 if the link is active.", "", "link")
NVLINK_SENT = _gpu("nvlink_transmitted_bytes_total", "Data sent over the link.", "bytes", "link", kind="counter")
NVLINK_RECEIVED = _gpu("nvlink_received_bytes_total", "Data received over the link.", "bytes", "link", kind="counter")
NVLINK_ERRORS = _gpu("nvlink_errors_total", "Errors on all links together.", "", "type", kind="counter")
PERFORMANCE_STATE = _gpu("performance_state", "P-state, 0 is the fastest.")
RECOVERY_ACTION = _gpu(
    "recovery_action",
    "What the driver asks for: 0 nothing, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset, "
    "5 recover the IMEX domain, 6 bus reset, 7 system reboot.",
)
PERSISTENCE = _gpu("persistence_mode", "1 if the driver stays loaded without clients.")
PROCESSES = _gpu("processes", "Compute processes on the GPU.")
PROCESS_MEMORY = _gpu("process_memory_bytes", "Device memory of all compute processes.", "bytes")

METRICS: Final = (
    SM_CLOCK, MEM_CLOCK, MEMORY_TEMP, GPU_TEMP, POWER_USAGE, ENERGY, PCIE_REPLAYS, GPU_UTIL, MEM_COPY_UTIL, ENC_UTIL,
    DEC_UTIL, XID_ERRORS, FB_FREE, FB_USED, FB_RESERVED, NVLINK_BANDWIDTH, REMAPPED_UNCORRECTABLE,
    REMAPPED_CORRECTABLE, REMAP_FAILURE, EVENT_REASONS, UP, INFO, THROTTLE, POWER_LIMIT, POWER_LIMIT_DEFAULT,
    POWER_LIMIT_MIN, POWER_LIMIT_MAX, TEMPERATURE_LIMIT, TEMPERATURE_MARGIN, MEMORY_TOTAL, CLOCK_MAX, ECC_ERRORS,
    REMAP_PENDING, RETIRED_PAGES, RETIRED_PENDING, PCIE_GENERATION, PCIE_GENERATION_MAX, PCIE_WIDTH, PCIE_WIDTH_MAX,
    NVLINK_UP, NVLINK_SENT, NVLINK_RECEIVED, NVLINK_ERRORS, PERFORMANCE_STATE, RECOVERY_ACTION, PERSISTENCE,
    PROCESSES, PROCESS_MEMORY,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Identity:
    """What a GPU is; does not change while it is in its slot."""

    index: int
    uuid: str
    pci_bus_id: str
    model: str

    def labels(self, metric: Metric, hostname: str, *extra: str) -> tuple[str, ...]:
        """The label values of ``metric`` for this GPU, ``extra`` being those after its identity."""
        if metric.labels is _DCGM_LABELS:
            return (str(self.index), self.uuid, self.pci_bus_id, f"nvidia{self.index}", self.model, hostname)
        return (str(self.index), self.uuid, *extra)


class Target(NamedTuple):
    """Where the number of a field value goes: ``value * scale`` into one series."""

    metric: Metric
    scale: float = 1.0
    extra: tuple[str, ...] = ()


FieldKey = tuple[int, int]
"""Field id and scope (a link, or 0)."""

ALL_LINKS: Final = 0xFFFFFFFF
LINK_COUNT: Final = 91
_LINK_SENT, _LINK_RECEIVED, _LINK_STATE = 138, 139, 165

# Field ids of nvml.h.
_FIELDS: Mapping[FieldKey, Target] = {
    (82, 0): Target(MEMORY_TEMP),
    (83, 0): Target(ENERGY),
    (94, 0): Target(PCIE_REPLAYS),
    (3, 0): Target(ECC_ERRORS, 1, ("corrected", "volatile")),
    (4, 0): Target(ECC_ERRORS, 1, ("uncorrected", "volatile")),
    (5, 0): Target(ECC_ERRORS, 1, ("corrected", "aggregate")),
    (6, 0): Target(ECC_ERRORS, 1, ("uncorrected", "aggregate")),
    (29, 0): Target(RETIRED_PAGES, 1, ("single_bit",)),
    (30, 0): Target(RETIRED_PAGES, 1, ("double_bit",)),
    (31, 0): Target(RETIRED_PENDING),
    (142, 0): Target(REMAPPED_CORRECTABLE),
    (143, 0): Target(REMAPPED_UNCORRECTABLE),
    (144, 0): Target(REMAP_PENDING),
    (145, 0): Target(REMAP_FAILURE),
    (230, 0): Target(RECOVERY_ACTION),
    (38, 0): Target(NVLINK_ERRORS, 1, ("crc_flit",)),
    (45, 0): Target(NVLINK_ERRORS, 1, ("crc_data",)),
    (52, 0): Target(NVLINK_ERRORS, 1, ("replay",)),
    (59, 0): Target(NVLINK_ERRORS, 1, ("recovery",)),
}

_THROTTLE_FIELDS: Mapping[int, str] = {
    74: "sw_power_cap",
    76: "sync_boost",
    251: "sw_thermal",
    252: "hw_thermal",
    253: "hw_power_brake",
    269: "sw_thermal",
    270: "hw_thermal",
    271: "hw_power_brake",
}
"""Cumulative nanoseconds: 251 to 253 in the headers of CUDA 12.9 and 13.0, 269 to 271 in later ones."""


def field_plan(links: int) -> dict[FieldKey, Target | None]:
    """Every field to ask a GPU with ``links`` NVLinks for, and where its number goes (None: it is used otherwise).

    NVLink fields come first: drivers have been seen to read one entry past an NVLink field that is the last (nvitop's
    libnvml.py guards against it).
    """
    plan: dict[FieldKey, Target | None] = {}
    if links:
        plan[_LINK_SENT, ALL_LINKS] = plan[_LINK_RECEIVED, ALL_LINKS] = None
    for link in range(links):
        plan[_LINK_SENT, link] = Target(NVLINK_SENT, 1024, (str(link),))
        plan[_LINK_RECEIVED, link] = Target(NVLINK_RECEIVED, 1024, (str(link),))
        plan[_LINK_STATE, link] = Target(NVLINK_UP, 1, (str(link),))
    plan.update(_FIELDS)
    plan.update(dict.fromkeys(((field, 0) for field in _THROTTLE_FIELDS), None))
    return plan


class FieldValue(NamedTuple):
    """One ``nvmlFieldValue_t``: ``bits`` are the raw eight bytes of the value, ``result`` an NVML return code."""

    id: int
    scope: int
    timestamp_us: int
    latency_us: int
    type: int
    result: int
    bits: int


_FIELD_VALUE = struct.Struct("=IIqqIIQ")
_DOUBLE, _UNSIGNED_INT, _UNSIGNED_LONG, _UNSIGNED_LONG_LONG, _SIGNED_LONG_LONG, _SIGNED_INT, _UNSIGNED_SHORT = range(7)


def field_values(raw: bytes | memoryview) -> Iterator[FieldValue]:
    """The entries of an ``nvmlFieldValue_t`` array. ``raw`` is a multiple of 40 bytes long."""
    return map(FieldValue._make, _FIELD_VALUE.iter_unpack(raw))


def number(field: FieldValue) -> float:
    """The value of a field by its declared type."""
    kind, bits = field.type, field.bits
    if kind == _UNSIGNED_INT:
        return bits & 0xFFFFFFFF
    if kind in (_UNSIGNED_LONG, _UNSIGNED_LONG_LONG):
        return bits
    if kind == _UNSIGNED_SHORT:
        return bits & 0xFFFF
    if kind == _SIGNED_INT:
        return (bits & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
    if kind == _SIGNED_LONG_LONG:
        return (bits ^ 1 << 63) - (1 << 63)
    return float(struct.unpack("=d", struct.pack("=Q", bits))[0])


def throttle_counters(fields: Sequence[FieldValue]) -> dict[str, int]:
    """Nanoseconds per throttle reason, from whichever field numbering the driver has.

    Other fields have had the same numbers (power smoothing, at 251 to 271); those are 32 bits wide, counters are 64.
    """
    wide = (_UNSIGNED_LONG, _UNSIGNED_LONG_LONG)
    return {_THROTTLE_FIELDS[f.id]: f.bits for f in fields if f.id in _THROTTLE_FIELDS and f.type in wide}


def nvlink_kib(fields: Sequence[FieldValue]) -> float | None:
    """KiB sent and received over all links, or None if the driver does not tell."""
    totals = [number(f) for f in fields if f.scope == ALL_LINKS and f.id in (_LINK_SENT, _LINK_RECEIVED)]
    return sum(totals) if len(totals) == 2 else None


def field_samples(
    fields: Sequence[FieldValue], series: Mapping[FieldKey, tuple[Metric, float, tuple[str, ...]]]
) -> Iterator[Sample]:
    """The samples of all fields that have a series of their own; ``series`` maps to metric, scale, label values."""
    for field in fields:
        if (found := series.get((field.id, field.scope))) is not None:
            metric, scale, labels = found
            yield Sample(metric, number(field) * scale, labels)
