"""All preflight checks, in the order in which the table shows them. Adding one is a file here and a line below."""

from __future__ import annotations

from typing import Final

from opsd.preflight.base import Check
from opsd.preflight.checks import (
    clock,
    collectives,
    cpu,
    dcgm,
    gpu_burn,
    gpu_health,
    gpu_host_copy,
    gpu_inventory,
    gpu_memory,
    gpu_peer,
    hugepages,
    infiniband,
    kernel_log,
    leftovers,
    limits,
    memory,
    nccl_tests,
    numa,
    nvbandwidth,
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
    dcgm.CHECK,
    gpu_burn.CHECK,
    gpu_burn.CHECK_FP8,
    gpu_memory.CHECK,
    gpu_host_copy.CHECK,
    gpu_peer.CHECK,
    collectives.CHECK,
    nccl_tests.CHECK,
    nvbandwidth.CHECK,
    cpu.CHECK,
    memory.CHECK,
    storage_local.CHECK,
    storage_shared.CHECK,
)
