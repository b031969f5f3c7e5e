"""Which remedy a fault calls for first, and which preflight checks prove that it is gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from opsd.preflight.report import failed_checks
from opsd.repair.repair_plan import REMEDIES, Remedy


@dataclass(frozen=True, slots=True)
class RepairRule:
    """``first`` is the lowest remedy that can help, None if checks that failed say so.

    ``checks`` load or read what failed; one of them has to pass.
    """

    first: Remedy | None
    checks: tuple[str, ...]

    @property
    def of_the_network(self) -> bool:
        """Whether it is one of the cards for the network between nodes, which only a partner can put under load."""
        return "infiniband" in self.checks


_GPU: Final = ("gpu_inventory", "gpu_health", "gpu_burn", "gpu_memory")
_LINKS: Final = ("gpu_inventory", "gpu_health", "gpu_peer", "collectives")

FAULTS: Final[Mapping[str, RepairRule]] = {
    "zombie_gpu_process": RepairRule(Remedy.PROCESSES, ("leftovers", "gpu_inventory", "gpu_health")),
    "gpu_xid": RepairRule(Remedy.RESET, _GPU),
    "gpu_ecc": RepairRule(Remedy.RESET, _GPU),
    "gpu_row_remap": RepairRule(Remedy.RESET, _GPU),
    "silent_corruption": RepairRule(Remedy.RESET, _GPU),
    "nvlink_errors": RepairRule(Remedy.RESET, _LINKS),
    "fabric_manager": RepairRule(Remedy.RELOAD, _LINKS),
    "gpu_driver_failed": RepairRule(Remedy.RELOAD, _GPU),
    "driver_hang": RepairRule(Remedy.RELOAD, _GPU),
    "gpu_lost": RepairRule(Remedy.REBOOT, _GPU),
    "pcie_error": RepairRule(Remedy.REBOOT, ("gpu_inventory", "gpu_health", "gpu_host_copy")),
    "pcie_degraded": RepairRule(Remedy.REBOOT, ("gpu_inventory", "gpu_health", "gpu_host_copy")),
    "kernel_lockup": RepairRule(Remedy.REBOOT, ("kernel_log", "cpu", "memory")),
    "machine_check": RepairRule(Remedy.REBOOT, ("kernel_log", "cpu", "memory")),
    "nic_failed": RepairRule(Remedy.REBOOT, ("infiniband",)),
    "preflight": RepairRule(None, ()),
}
"""By the kind of incident in the reason of the drain. Other kinds do not start a repair: fans, cables, disks, power,
and drains by a person."""

_OF_GPUS: Final = (*_GPU, *_LINKS, "gpu_burn_fp8", "gpu_host_copy", "nvbandwidth", "nccl_tests", "dcgm")
_BY_CHECK: Final = {"leftovers": Remedy.PROCESSES, **dict.fromkeys(_OF_GPUS, Remedy.RESET)}
"""The lowest remedy that can help where a check has failed."""

NOT_HARDWARE: Final = frozenset(
    {
        "clock",
        "hugepages",
        "leftovers",
        "limits",
        "pressure",
        "run_alerts",
        "run_config",
        "run_data",
        "run_evaluation",
        "run_initial",
        "run_steps",
        "storage_shared",
        "versions",
    }
)
"""Checks of users' processes, settings, servers and runs: with these alone a node has nothing to be replaced for."""

_ASKS: Final = {1: Remedy.RESET, 4: Remedy.RESET, 6: Remedy.RESET, 2: Remedy.REBOOT, 7: Remedy.REBOOT}
"""What the driver's recovery action (nvmlDeviceGpuRecoveryAction_t) asks for."""


def curable(failed: Iterable[str]) -> bool:
    """Whether a preflight that ``failed`` in these checks is a matter for the ladder: a missing mount is none."""
    checks = frozenset(failed)
    return bool(checks) and checks <= _BY_CHECK.keys()


def begin_at(fault: RepairRule, reason: str, recovery_actions: Iterable[int]) -> Remedy:
    """The first remedy: the fault's own, or that of checks in the drain's ``reason``; higher if the driver asks."""
    failed = (_BY_CHECK.get(check, Remedy.RESET) for check in failed_checks(reason))
    first = fault.first or max(failed, default=Remedy.RESET, key=REMEDIES.index)
    asked = (_ASKS[action] for action in recovery_actions if action in _ASKS)
    return max((first, *asked), key=REMEDIES.index)
