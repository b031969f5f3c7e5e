"""All preflight checks. ``NAMES`` is where they are registered."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from opsd.preflight.base import Check

NAMES = (
    "pressure",
    "versions",
    "limits",
    "hugepages",
    "numa",
    "clock",
    "kernel_log",
    "leftovers",
    "infiniband",
    "gpu_inventory",
    "gpu_health",
    "dcgm",
    "gpu_burn",
    "gpu_memory",
    "gpu_host_copy",
    "gpu_peer",
    "collectives",
    "nccl_tests",
    "nvbandwidth",
    "cpu",
    "memory",
    "storage",
    "run_audit",
    "run_config",
    "run_initial",
    "run_data",
    "run_evaluation",
    "run_steps",
    "run_alerts",
)
"""The files of the checks, in the order in which the table shows them."""

CHECKS: Final[tuple[Check, ...]] = tuple(
    value for name in NAMES for value in vars(import_module(f"{__name__}.{name}")).values() if isinstance(value, Check)
)
