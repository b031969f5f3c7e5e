"""Runbooks: one file per kind of incident, each with detector, diagnosis and remedy; ``lib.guides`` has the guides.

The modules of this folder are the runbooks, but for ``base``, which says what a runbook is. ``lib`` has what they are
made of. ``NAMES`` is where they are registered.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from opsd.runbooks.base import Runbook

NAMES = (
    "rank_crash",
    "node_unreachable",
    "rank_hang",
    "collective_hang",
    "dataloader_stall",
    "dataloader_growth",
    "checkpoint_corrupt",
    "tp_seed",
    "replica_divergence",
    "silent_corruption",
    "gpu_lost",
    "driver_hang",
    "gpu_xid",
    "node_throttle",
    "gpu_throttle",
    "gpu_capped",
    "gpu_memory_hot",
    "fan_failing",
    "zombie_gpu_process",
    "gpu_idle",
    "gpu_ecc",
    "gpu_ecc_trend",
    "gpu_row_remap",
    "nvlink_errors",
    "fabric_manager",
    "pcie_degraded",
    "ib_link",
    "nic_degrading",
    "straggler",
    "throughput_drop",
    "loss_nan",
    "loss_spike",
    "loss_rising",
    "loss_plateau",
    "gradient_explosion",
    "router_collapse",
    "checkpoint_slow",
    "checkpoint_stale",
    "eval_missing",
    "eval_lag",
    "rl_signal",
    "storage_slow",
    "storage_full",
    "nvme_failing",
    "host_memory",
    "oom_kill",
    "machine_check",
    "kernel_lockup",
    "kernel_oops",
    "clock_unstable",
    "cpu_thermal",
    "disk_errors",
    "pcie_error",
    "gpu_driver_failed",
    "nic_failed",
    "lustre_client",
    "clock_skew",
)
"""Every runbook, in the order in which they are asked."""

RUNBOOKS: tuple[Runbook, ...] = tuple(replace(import_module(f"{__name__}.{name}").RUNBOOK, kind=name) for name in NAMES)
