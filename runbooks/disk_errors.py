"""A local disk or its file system fails: a controller that resets, I/O errors, a file system set to read-only."""

from __future__ import annotations

from collections.abc import Iterator
from re import compile

from opsd.runbooks.base import Cause, View
from opsd.runbooks.lib.kernel_faults import HOUR_S, Data, KernelFault, Lasting, Row, has, kernel_runbook, lasting_fault
from opsd.runbooks.lib.signals import counted, text

_NAMESPACE = compile(r"(nvme\d+)(?:c\d+)?n\d+")
_NO_DISK = compile(r"(?:loop|sr|fd|zram|ram|nbd)\d")
"""Devices without a disk of the node behind them: the errors of a mounted image, which any user may have made."""

_LOST = compile(r"Disabling|Removing|Device not ready|no available path")
_POLLED, _GONE = "completion polled", "SAS host is non-operational"


def _disk(data: Data) -> bool:
    return not _NO_DISK.match(text(data, "device"))


def _drive(device: str) -> str:
    """The NVMe controller of a namespace or partition; other devices as they are."""
    match = _NAMESPACE.match(device)
    return match[1] if match else device


MISSING = "opsd_storage_array_missing_disks"

FAILED = Row("raid_failed", "the array {device} has failed", critical=True, within_s=0.0)
DEGRADED = Row("raid_failed", "the array {device} lacks {disk}", within_s=0.0)


def _arrays(view: View, _seconds: float) -> Iterator[KernelFault]:
    """Arrays that have lost disks, whenever that was."""
    for series in view.select(MISSING):
        if missing := series.last:
            device, disks = series.labels["device"], counted(int(missing), "disk")
            row, said = (FAILED, f"{device} is broken") if missing < 0 else (DEGRADED, f"{device} lacks {disks}")
            yield lasting_fault(view, row, device, said, "/proc/mdstat", device=device, disk=disks)


ROWS = (
    Row(
        "raid_failed",
        "the array {device} has failed: {outcome} {disk}",
        has("outcome", "failing array", "Cannot continue operation"),
        "device",
        critical=True,
    ),
    Row("raid_failed", "the array {device} has lost {disk}", has("outcome", "disabling device"), "device"),
    Row("filesystem_readonly", "the file system on {device} was set to read-only", _disk, "device", critical=True),
    Row("filesystem_shutdown", "the file system on {device} was shut down", _disk, "device", critical=True),
    Row(
        "nvme_error",
        "{device} is lost: {outcome}",
        lambda data: bool(_LOST.match(text(data, "outcome"))),
        "device",
        critical=True,
    ),
    Row(
        "nvme_error",
        "{device} does not answer in time: {outcome}",
        lambda data: text(data, "outcome") != _POLLED,
        "device",
        within_s=HOUR_S,
    ),
    Row("controller_error", "{device} is lost: {outcome}", has("outcome", _GONE), "device", critical=True),
    Row(
        "controller_error",
        "the firmware of {device} has failed: {outcome}",
        lambda data: text(data, "outcome") != _GONE,
        "device",
        within_s=HOUR_S,
    ),
    Row("nvme_error", "{device} loses interrupts", has("outcome", _POLLED), "device", at_least=3, within_s=HOUR_S),
    Row("io_error", "I/O errors of {device}", _disk, "device", within_s=HOUR_S),
    Row("filesystem_error", "errors of the file system on {device}", _disk, "device", within_s=HOUR_S),
)

RUNBOOK = kernel_runbook(
    "disk_errors",
    ROWS,
    """
# A local disk or file system has errors

## Meaning
The kernel has reported trouble with a disk. It is one of these:
- An NVMe controller does not answer in time and is reset, or is given up.
- A disk has I/O errors.
- The firmware of a SAS or RAID controller has failed, or the controller is gone.
- A file system on it has errors. Some are set to read-only or shut down for that.
- An array of software RAID has failed or lacks a disk. `/proc/mdstat` counts as well.

Devices without a disk (loop, CD, RAM) do not count. Nor do commands that a drive does not support, or an array that is
being rebuilt.

## Impact
Reads and writes of that disk fail or hang for half a minute and longer: loaders, staged data, local checkpoints, or
the system itself. A read-only or shut down file system fails every write to it until it is repaired.

## Diagnosis
1. `opsd incidents show ID`: which device, and what the kernel said.
2. `findmnt -S /dev/DEVICE`: what is mounted from it. The root file system makes the node unusable.
3. `journalctl -k --since -1hour | grep -iE "nvme|i/o error|remounting|xfs|ext4|btrfs"`: what came first. Errors of
   the PCIe port above the drive point to the slot, not to the drive.
4. `smartctl -a /dev/nvme0`: media errors, critical warning, temperature.
5. `cat /proc/mdstat`: which disk of an array is missing (`_` in its list).

## Mitigation
- Read-only or shut down: take the node out, then check the file system while it is not mounted.
- A controller that is gone: a cold start brings it back once; have drive or slot replaced if it happens again.
- Time-outs without errors: newer firmware of the drive, and `pcie_aspm=off` on boards known for it.

## What opsd does by itself
- observe: opens the incident; resolves it after a reboot, an hour without errors, or a day if data cannot be written.
- recommend: the same, and notifies.
- act: if a file system is read-only or a drive is lost, a run on several nodes with a spare swaps this node for it,
  and the node is drained if policy.drain allows it.
""",
    component="storage",
    advice=": check the drive and have it replaced",
    cost="loaders and checkpoints on it fail",
    lasting=Lasting("storage", _arrays),
    whole=_drive,
    causes=(Cause("pcie_error", "node"),),
)
