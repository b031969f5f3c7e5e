"""Runbooks: one file per kind of incident, each the page, the detector, the diagnosis and the remedy."""

from runbooks import checkpoint_corrupt, dataloader_stall, gpu_throttle, rank_crash, rank_hang
from runbooks.base import Runbook

RUNBOOKS: tuple[Runbook, ...] = (
    rank_crash.RUNBOOK,
    rank_hang.RUNBOOK,
    dataloader_stall.RUNBOOK,
    gpu_throttle.RUNBOOK,
    checkpoint_corrupt.RUNBOOK,
)
"""Every runbook of opsd, in the order in which they are asked."""
