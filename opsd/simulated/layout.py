"""The state file of the simulated GPUs: the mirror of ``gpu.h``, field by field."""

from __future__ import annotations

import ctypes
from typing import Final

MAGIC: Final = 0x4453504F
VERSION: Final = 3
MAX_GPUS: Final = 16
LINKS: Final = 18
PROCESSES: Final = 8
XIDS: Final = 16
INSTANCES: Final = 7
NO_INSTANCE: Final = 0xFFFFFFFF


class Totals(ctypes.Structure):
    """``struct totals`` of gpu.h."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("engine_s", "sm_s", "warps_s", "tensor_s", "dram_s")),
        *((name, ctypes.c_double) for name in ("pcie_sent", "pcie_received", "link_kib")),
    )


class MigState(ctypes.Structure):
    """``struct mig`` of gpu.h."""

    _fields_ = (
        ("uuid", ctypes.c_char * 64),
        ("name", ctypes.c_char * 64),
        *((name, ctypes.c_uint64) for name in ("memory_total", "memory_used")),
        *((name, ctypes.c_uint32) for name in ("gpu_instance", "compute_instance")),
    )


class GpuState(ctypes.Structure):
    """``struct gpu`` of gpu.h; the fields from ``limit_w`` on are written by the library."""

    _fields_ = (
        ("uuid", ctypes.c_char * 64),
        ("name", ctypes.c_char * 64),
        ("bus_id", ctypes.c_char * 32),
        ("serial", ctypes.c_char * 32),
        ("vbios", ctypes.c_char * 32),
        ("unsupported", ctypes.c_char * 512),
        ("denied", ctypes.c_char * 256),
        *((name, ctypes.c_double) for name in ("utilization", "memory_utilization", "demand_w", "cooling")),
        *((name, ctypes.c_double) for name in ("ambient_c", "tau_s", "link_kib_per_s", "hang_until")),
        *((name, ctypes.c_double) for name in ("tensor_share", "pcie_bytes_per_s")),
        *((name, ctypes.c_uint64) for name in ("memory_total", "memory_used", "memory_reserved")),
        ("ecc", (ctypes.c_uint64 * 2) * 2),
        ("link_errors", (ctypes.c_uint64 * LINKS) * 3),
        ("process_memory", ctypes.c_uint64 * PROCESSES),
        ("mig", MigState * INSTANCES),
        ("process_pid", ctypes.c_uint32 * PROCESSES),
        ("process_instance", ctypes.c_uint32 * PROCESSES),
        *((name, ctypes.c_uint32) for name in ("mig_enabled", "mig_count")),
        ("link_active", ctypes.c_uint32 * LINKS),
        ("remapped", ctypes.c_uint32 * 4),
        *((name, ctypes.c_uint32) for name in ("pcie_gen", "pcie_width", "pcie_replays", "recovery_action")),
        ("pcie_errors", ctypes.c_uint32 * 2),
        ("sram_exceeded", ctypes.c_uint32),
        *((name, ctypes.c_uint32) for name in ("persistence", "lost", "forced_reasons", "counters_work")),
        *((name, ctypes.c_uint32) for name in ("profiling", "fabric_state", "fabric_status", "fabric_health")),
        ("xid", ctypes.c_uint32 * XIDS),
        ("xid_instance", ctypes.c_uint32 * XIDS),
        ("xid_count", ctypes.c_uint32),
        ("fabric_clique", ctypes.c_uint32),
        ("fabric_cluster", ctypes.c_ubyte * 16),
        *((name, ctypes.c_double) for name in ("limit_w", "updated", "temperature_c", "power_w", "scale")),
        ("energy_mj", ctypes.c_double),
        ("totals", Totals),
        ("counter_ns", ctypes.c_uint64 * 5),
        *((name, ctypes.c_uint64) for name in ("calls", "blocking_calls")),
        *((name, ctypes.c_uint32) for name in ("reasons", "sm_mhz")),
    )


class State(ctypes.Structure):
    """``struct state`` of gpu.h."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("size", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("count", "driver", "init_error", "reloads")),
        ("gpus", GpuState * MAX_GPUS),
    )


STATE_BYTES: Final = ctypes.sizeof(State)
