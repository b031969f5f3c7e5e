"""Runbooks: one file per kind of incident, each the page, the detector, the diagnosis and the remedy."""

from runbooks import (
    checkpoint_corrupt,
    dataloader_stall,
    gpu_ecc,
    gpu_lost,
    gpu_row_remap,
    gpu_throttle,
    nvlink_errors,
    pcie_degraded,
    rank_crash,
    rank_hang,
)
from runbooks.base import Runbook

RUNBOOKS: tuple[Runbook, ...] = (
    rank_crash.RUNBOOK,
    rank_hang.RUNBOOK,
    dataloader_stall.RUNBOOK,
    checkpoint_corrupt.RUNBOOK,
    gpu_lost.RUNBOOK,
    gpu_throttle.RUNBOOK,
    gpu_ecc.RUNBOOK,
    gpu_row_remap.RUNBOOK,
    nvlink_errors.RUNBOOK,
    pcie_degraded.RUNBOOK,
)
"""Every runbook of opsd, in the order in which they are asked."""
