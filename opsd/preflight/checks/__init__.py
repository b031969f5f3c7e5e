"""All preflight checks, in the order in which the table shows them. Adding one is a file here and a line below."""

from __future__ import annotations

from typing import Final

from opsd.preflight.base import Check
from opsd.preflight.checks import (
    clock,
    cpu,
    gpu_health,
    gpu_inventory,
    hugepages,
    infiniband,
    kernel_log,
    leftovers,
    limits,
    memory,
    numa,
    pressure,
    storage_local,
    storage_shared,
    versions,
)

CHECKS: Final[tuple[Check, ...]] = (
    pressure.CHECK,
    versions.CHECK,
    limits.CHECK,
    hugepages.CHECK,
    numa.CHECK,
    clock.CHECK,
    kernel_log.CHECK,
    leftovers.CHECK,
    infiniband.CHECK,
    gpu_inventory.CHECK,
    gpu_health.CHECK,
    cpu.CHECK,
    memory.CHECK,
    storage_local.CHECK,
    storage_shared.CHECK,
)
