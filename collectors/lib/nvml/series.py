"""The series of the NVML collector: names, help and labels.

Names that begin with ``DCGM_FI_`` and their labels are those of dcgm-exporter's default counters, so that dashboards
and alerts written for it work unchanged. Their units are dcgm-exporter's too and stand in the help text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from opsd.collectors.base import Metric, MetricKind

DCGM_LABELS: Final = {
    "gpu": "GPUs of the node by index",
    "UUID": "one per GPU",
    "pci_bus_id": "one per GPU",
    "device": "one per GPU",
    "modelName": "one per GPU",
    "Hostname": "name of the node",
    "hostname": "the same, by the name that dcgm-exporter has for it since 2026",
}
LABELS: Final = {
    **DCGM_LABELS,
    "cause": "single_bit, double_bit",
    "clique": "one at a time",
    "clock": "sm, memory",
    "cluster_uuid": "one per rack, one at a time",
    "counter": "volatile, aggregate",
    "driver_version": "one at a time",
    "link": "NVLinks of a GPU, 18 on an H100",
    "problem": "problems of the NVLink fabric, 5 known",
    "severity": "fatal, non_fatal",
    "simulated": "yes, no",
    "threshold": "shutdown, slowdown, gpu_max, memory_max",
    "type": "corrected, uncorrected for ECC; types of NVLink errors",
    "vbios_version": "one per GPU",
    "model": "one per GPU",
    "reason": "6 reasons for throttling",
}
_DCGM_LABELS: Final = tuple(DCGM_LABELS)
_GPU_LABELS = ("gpu", "UUID")


def dcgm(name: str, help_text: str, kind: MetricKind = "gauge", *, kept: bool = True) -> Metric:
    """A metric of dcgm-exporter, by its name after ``DCGM_FI_``."""
    return Metric(f"DCGM_FI_{name}", help_text, kind, labels=_DCGM_LABELS, kept=kept)


def _dcgm(name: str, help_text: str, kind: MetricKind = "gauge", *, kept: bool = True) -> Metric:
    return dcgm(f"DEV_{name}", help_text, kind, kept=kept)


def _gpu(
    name: str, help_text: str, unit: str = "", *labels: str, kind: MetricKind = "gauge", kept: bool = True
) -> Metric:
    return Metric(f"opsd_gpu_{name}", help_text, kind, unit, (*_GPU_LABELS, *labels), kept)


SM_CLOCK = _dcgm("SM_CLOCK", "SM clock (MHz).")
MEM_CLOCK = _dcgm("MEM_CLOCK", "Memory clock (MHz).", kept=False)
MEMORY_TEMP = _dcgm("MEMORY_TEMP", "Memory temperature (degrees Celsius).")
GPU_TEMP = _dcgm("GPU_TEMP", "GPU temperature (degrees Celsius).")
POWER_USAGE = _dcgm("POWER_USAGE", "Board power draw (W).")
ENERGY = _dcgm("TOTAL_ENERGY_CONSUMPTION", "Energy used since the driver was loaded (mJ).", "untyped", kept=False)
PCIE_REPLAYS = _dcgm("PCIE_REPLAY_COUNTER", "PCIe replays since the driver was loaded.", "untyped")
GPU_UTIL = _dcgm("GPU_UTIL", "Share of time with at least one kernel running (percent).")
MEM_COPY_UTIL = _dcgm("MEM_COPY_UTIL", "Share of time with device memory being read or written (percent).", kept=False)
ENC_UTIL = _dcgm("ENC_UTIL", "Encoder utilization (percent).", kept=False)
DEC_UTIL = _dcgm("DEC_UTIL", "Decoder utilization (percent).", kept=False)
XID_ERRORS = _dcgm("XID_ERRORS", "Last Xid since the collector started, 0 if none.")
FB_FREE = _dcgm("FB_FREE", "Framebuffer memory free (MiB).", kept=False)
FB_USED = _dcgm("FB_USED", "Framebuffer memory used (MiB).")
FB_RESERVED = _dcgm("FB_RESERVED", "Framebuffer memory reserved by the driver (MiB).", kept=False)
NVLINK_BANDWIDTH = _dcgm(
    "NVLINK_BANDWIDTH_TOTAL", "Data sent and received over all NVLinks (KiB).", "untyped", kept=False
)
REMAPPED_UNCORRECTABLE = _dcgm("UNCORRECTABLE_REMAPPED_ROWS", "Rows remapped after uncorrectable errors.", "untyped")
REMAPPED_CORRECTABLE = _dcgm("CORRECTABLE_REMAPPED_ROWS", "Rows remapped after correctable errors.", "untyped")
REMAP_FAILURE = _dcgm("ROW_REMAP_FAILURE", "1 if remapping a row has failed.")
EVENT_REASONS = _dcgm("CLOCKS_EVENT_REASONS", "Bit mask of the reasons that hold the clocks back right now.")
THROTTLE_REASONS = _dcgm(
    "CLOCK_THROTTLE_REASONS", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS by its name before DCGM 3.3.", kept=False
)
"""One sample more per GPU, for which alerts from before the renaming keep working: silence would look like health."""

UP = _gpu("up", "1 if the GPU answers its driver, 0 if it is lost.")
INFO = _gpu(
    "info",
    "What the GPU is.",
    "",
    "pci_bus_id",
    "model",
    "driver_version",
    "vbios_version",
    "simulated",
    kind="info",
    kept=False,
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
CLOCK_MAX = _gpu("clock_max_hertz", "Highest clock.", "hertz", "clock", kept=False)
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
PCIE_ERRORS = _gpu(
    "pcie_errors_total",
    "PCIe errors that were not corrected, since the driver was loaded.",
    "",
    "severity",
    kind="counter",
)
SRAM_THRESHOLD = _gpu(
    "sram_threshold_exceeded", "1 if uncorrected errors of the SRAM have passed the threshold for a replacement."
)
PCIE_WIDTH_MAX = _gpu("pcie_link_width_max", "Most PCIe lanes of GPU and slot together.")
NVLINK_SENT = _gpu("nvlink_transmitted_bytes_total", "Data sent over all NVLinks.", "bytes", kind="counter")
NVLINK_RECEIVED = _gpu("nvlink_received_bytes_total", "Data received over all NVLinks.", "bytes", kind="counter")
NVLINK_ERRORS = _gpu("nvlink_errors_total", "Errors on all NVLinks together.", "", "type", kind="counter")
NVLINK_UP = _gpu("nvlink_up", "1 if the link is active.", "", "link")
NVLINK_LINK_ERRORS = _gpu(
    "nvlink_link_errors_total",
    "Replays, recoveries and CRC errors of one link.",
    "",
    "link",
    kind="counter",
    kept=False,
)
PERFORMANCE_STATE = _gpu("performance_state", "P-state, 0 is the fastest.")
RECOVERY_ACTION = _gpu(
    "recovery_action",
    "What the driver asks for: 0 nothing, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset, "
    "5 recover the IMEX domain, 6 bus reset, 7 system reboot.",
)
PERSISTENCE = _gpu("persistence_mode", "1 if the driver stays loaded without clients.")
PROCESSES = _gpu("processes", "Compute processes on the GPU.")
PROCESS_MEMORY = _gpu("process_memory_bytes", "Device memory of all compute processes.", "bytes")
ORPHANS = _gpu("orphan_processes", "Compute processes that hold the GPU and are dead: gone, or zombies.")
ORPHAN_MEMORY = _gpu("orphan_memory_bytes", "Device memory of processes that are dead.", "bytes")
FABRIC_STATE = _gpu(
    "fabric_state", "Place in the NVLink fabric: 1 not started, 2 being registered, 3 registered; none without fabric."
)
FABRIC_INFO = _gpu(
    "fabric_info",
    "The NVLink domain that a GPU shares with those of other nodes; none where the fabric ends in the node.",
    "",
    "cluster_uuid",
    "clique",
    kind="info",
    kept=False,
)
FABRIC_STATUS = _gpu("fabric_status", "How the registration ended: 0 well, otherwise NVML's error code.")
FABRIC_PROBLEM = _gpu(
    "fabric_problem", "1 if the fabric has this problem; none where the GPU cannot tell.", "", "problem"
)
PROFILING = _gpu("profiling", "1 if the GPU tells what its units do (DCGM_FI_PROF_*): Hopper and later.", kept=False)
DRIVER_RELOADS = Metric(
    "opsd_gpu_driver_reloads_total", "Times the driver ended the agent's session, as at its reload.", "counter"
)

METRICS: Final = (
    SM_CLOCK, MEM_CLOCK, MEMORY_TEMP, GPU_TEMP, POWER_USAGE, ENERGY, PCIE_REPLAYS, GPU_UTIL, MEM_COPY_UTIL, ENC_UTIL,
    DEC_UTIL, XID_ERRORS, FB_FREE, FB_USED, FB_RESERVED, NVLINK_BANDWIDTH, REMAPPED_UNCORRECTABLE, REMAPPED_CORRECTABLE,
    REMAP_FAILURE, EVENT_REASONS, THROTTLE_REASONS, UP, INFO, THROTTLE, POWER_LIMIT, POWER_LIMIT_DEFAULT,
    POWER_LIMIT_MIN, POWER_LIMIT_MAX, TEMPERATURE_LIMIT, TEMPERATURE_MARGIN, MEMORY_TOTAL, CLOCK_MAX, ECC_ERRORS,
    REMAP_PENDING, RETIRED_PAGES, RETIRED_PENDING, PCIE_GENERATION, PCIE_GENERATION_MAX, PCIE_WIDTH, PCIE_WIDTH_MAX,
    PCIE_ERRORS, SRAM_THRESHOLD,
    NVLINK_SENT, NVLINK_RECEIVED, NVLINK_ERRORS, NVLINK_UP, NVLINK_LINK_ERRORS, PERFORMANCE_STATE, RECOVERY_ACTION,
    PERSISTENCE, PROCESSES, PROCESS_MEMORY, ORPHANS, ORPHAN_MEMORY, FABRIC_STATE, FABRIC_INFO, FABRIC_STATUS,
    FABRIC_PROBLEM, PROFILING, DRIVER_RELOADS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a GPU, which does not change while it is in its slot."""

    index: int
    uuid: str
    pci_bus_id: str
    model: str

    def labels(self, metric: Metric, hostname: str, *extra: str) -> tuple[str, ...]:
        """The label values of ``metric`` for this GPU, ``extra`` being those after its identity."""
        if metric.labels is _DCGM_LABELS:
            return (str(self.index), self.uuid, self.pci_bus_id, f"nvidia{self.index}", self.model, hostname, hostname)
        return (str(self.index), self.uuid, *extra)
