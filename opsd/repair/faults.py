"""Which remedy a fault calls for first, and which preflight checks prove that it is gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from opsd.preflight.report import failed_checks
from opsd.repair.ladder import LADDER, Rung


@dataclass(frozen=True, slots=True)
class Fault:
    """``first`` is the lowest rung that can help, None if checks that failed say so.

    ``checks`` load or read what failed; one of them has to pass.
    """

    first: Rung | None
    checks: tuple[str, ...]

    @property
    def of_the_network(self) -> bool:
        """Whether it is one of the cards for the network between nodes, which only a partner can put under load."""
        return "infiniband" in self.checks


_GPU: Final = ("gpu_inventory", "gpu_health", "gpu_burn", "gpu_memory")
_LINKS: Final = ("gpu_inventory", "gpu_health", "gpu_peer", "collectives")

FAULTS: Final[Mapping[str, Fault]] = {
    "zombie_gpu_process": Fault(Rung.PROCESSES, ("leftovers", "gpu_inventory", "gpu_health")),
    "gpu_xid": Fault(Rung.RESET, _GPU),
    "gpu_ecc": Fault(Rung.RESET, _GPU),
    "gpu_row_remap": Fault(Rung.RESET, _GPU),
    "silent_corruption": Fault(Rung.RESET, _GPU),
    "nvlink_errors": Fault(Rung.RESET, _LINKS),
    "fabric_manager": Fault(Rung.RELOAD, _LINKS),
    "gpu_driver_failed": Fault(Rung.RELOAD, _GPU),
    "driver_hang": Fault(Rung.RELOAD, _GPU),
    "gpu_lost": Fault(Rung.REBOOT, _GPU),
    "pcie_error": Fault(Rung.REBOOT, ("gpu_inventory", "gpu_health", "gpu_host_copy")),
    "pcie_degraded": Fault(Rung.REBOOT, ("gpu_inventory", "gpu_health", "gpu_host_copy")),
    "kernel_lockup": Fault(Rung.REBOOT, ("kernel_log", "cpu", "memory")),
    "machine_check": Fault(Rung.REBOOT, ("kernel_log", "cpu", "memory")),
    "nic_failed": Fault(Rung.REBOOT, ("infiniband",)),
    "preflight": Fault(None, ()),
}
"""By the kind of incident in the reason of the drain. Other kinds do not start a repair: fans, cables, disks, power,
and drains by a person."""

_OF_GPUS: Final = (*_GPU, *_LINKS, "gpu_burn_fp8", "gpu_host_copy", "nvbandwidth", "nccl_tests", "dcgm")
_BY_CHECK: Final = {"leftovers": Rung.PROCESSES, **dict.fromkeys(_OF_GPUS, Rung.RESET)}
"""The lowest rung that can help where a check has failed."""

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

_ASKS: Final = {1: Rung.RESET, 4: Rung.RESET, 6: Rung.RESET, 2: Rung.REBOOT, 7: Rung.REBOOT}
"""What the driver's recovery action (nvmlDeviceGpuRecoveryAction_t) asks for."""


def curable(failed: Iterable[str]) -> bool:
    """Whether a preflight that ``failed`` in these checks is a matter for the ladder: a missing mount is none."""
    checks = frozenset(failed)
    return bool(checks) and checks <= _BY_CHECK.keys()


def begin_at(fault: Fault, reason: str, recovery_actions: Iterable[int]) -> Rung:
    """The rung to begin at: the fault's own, or that of checks in the drain's ``reason``; higher if the driver asks."""
    failed = (_BY_CHECK.get(check, Rung.RESET) for check in failed_checks(reason))
    first = fault.first or max(failed, default=Rung.RESET, key=LADDER.index)
    asked = (_ASKS[action] for action in recovery_actions if action in _ASKS)
    return max((first, *asked), key=LADDER.index)
