"""A local disk or its file system fails: a controller that resets, I/O errors, a file system set to read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from re import compile

from opsd.runbooks.base import Cause, View
from opsd.runbooks.lib.kernel_faults import (
    BOOT_TIME,
    HOUR_S,
    KernelFault,
    Lasting,
    Row,
    has,
    kernel_runbook,
    lacks,
    lasting_fault,
    matches,
)
from opsd.runbooks.lib.signals import counted, latest, text

_NAMESPACE = compile(r"(nvme\d+)(?:c\d+)?n\d+")
_PARTITION = compile(r"((?:sd|vd|xvd)[a-z]+)\d+$")
_disk = lacks("device", r"^(loop|sr|fd|zram|ram|nbd)\d")
"""Not devices without a disk of the node behind them: the errors of a mounted image, which any user may have made."""

_LOST = "^(Disabling|Removing|Device not ready|no available path)"
_GONE = "^(SAS host is non-operational|controller (is )?offline)"


def _drive(device: str) -> str:
    """The NVMe controller of a namespace or partition, the disk of a partition; other devices as they are."""
    match = _NAMESPACE.match(device) or _PARTITION.match(device)
    return match[1] if match else device


def _whole(view: View) -> Callable[[str], str]:
    """The drive that a device is on; that of an array is the one that it has lost last."""
    since_boot = view.wall - (latest(view, BOOT_TIME) or 0.0)
    said = [event.data for event in view.events("raid_failed", since_boot) if text(event.data, "disk")]
    lost = {text(data, "device"): _drive(text(data, "disk")) for data in said}
    return lambda about: lost.get(about) or _drive(about)


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
    Row("raid_failed", "the array {device} has failed: {outcome} {disk}",
        matches("outcome", "^(failing array|Cannot continue)"), "device", critical=True),
    Row("raid_failed", "the array {device} has lost {disk}", has("outcome", "disabling device"), "device"),
    Row("filesystem_readonly", "the file system on {device} was set to read-only", _disk, "device", critical=True),
    Row("filesystem_shutdown", "the file system on {device} was shut down", _disk, "device", critical=True),
    Row("nvme_error", "{device} is lost: {outcome}", matches("outcome", _LOST), "device", critical=True),
    Row("nvme_error", "{device} loses interrupts", has("outcome", "completion polled"), "device", at_least=3,
        within_s=HOUR_S),
    Row("nvme_error", "{device} does not answer in time: {outcome}", about="device", within_s=HOUR_S),
    Row("controller_error", "{device} is lost: {outcome}", matches("outcome", _GONE), "device", critical=True),
    Row("controller_error", "the firmware of {device} has failed: {outcome}", about="device", within_s=HOUR_S),
    Row("io_error", "I/O errors of {device}", _disk, "device", within_s=HOUR_S),
    Row("filesystem_error", "errors of the file system on {device}", _disk, "device", within_s=HOUR_S),
)  # fmt: skip

RUNBOOK = kernel_runbook(
    ROWS,
    component="storage",
    advice=": check the drive and have it replaced",
    cost="loaders and checkpoints on it fail",
    lasting=Lasting("storage", _arrays),
    whole=_whole,
    causes=(Cause("pcie_error", "node"),),
)
