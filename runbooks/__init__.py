"""Runbooks: one file per kind of incident, each the page, the detector, the diagnosis and the remedy."""

from runbooks import dataloader_stall, rank_crash, rank_hang
from runbooks.base import Runbook

RUNBOOKS: tuple[Runbook, ...] = (
    rank_crash.RUNBOOK,
    rank_hang.RUNBOOK,
    dataloader_stall.RUNBOOK,
)
"""Every runbook of opsd, in the order in which they are asked."""
