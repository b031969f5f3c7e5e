"""Runbooks: one file per kind of incident, each the page, the detector, the diagnosis and the remedy."""

from runbooks import (
    checkpoint_corrupt,
    checkpoint_stale,
    dataloader_stall,
    fan_failing,
    gpu_ecc,
    gpu_lost,
    gpu_row_remap,
    gpu_throttle,
    gpu_xid,
    gradient_explosion,
    host_memory,
    loss_nan,
    loss_spike,
    nvlink_errors,
    pcie_degraded,
    rank_crash,
    rank_hang,
    storage_full,
    straggler,
    throughput_drop,
)
from runbooks.base import Runbook

RUNBOOKS: tuple[Runbook, ...] = (
    rank_crash.RUNBOOK,
    rank_hang.RUNBOOK,
    dataloader_stall.RUNBOOK,
    checkpoint_corrupt.RUNBOOK,
    gpu_lost.RUNBOOK,
    gpu_xid.RUNBOOK,
    gpu_throttle.RUNBOOK,
    fan_failing.RUNBOOK,
    gpu_ecc.RUNBOOK,
    gpu_row_remap.RUNBOOK,
    nvlink_errors.RUNBOOK,
    pcie_degraded.RUNBOOK,
    straggler.RUNBOOK,
    throughput_drop.RUNBOOK,
    loss_nan.RUNBOOK,
    loss_spike.RUNBOOK,
    gradient_explosion.RUNBOOK,
    checkpoint_stale.RUNBOOK,
    storage_full.RUNBOOK,
    host_memory.RUNBOOK,
)
"""Every runbook of opsd, in the order in which they are asked."""
