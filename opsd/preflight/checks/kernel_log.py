"""The kernel log of the last day: Xids by their recommended action, machine checks, failing disks and file systems.

Messages about GPUs from before a repair reset them, or reloaded their driver, are left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from opsd.collectors.kmsg import parse_message
from opsd.collectors.lib.clock import uptime_s
from opsd.collectors.lib.kernel.messages import KERNEL, KernelLogDevice, LogRecord, Trouble, parse_record
from opsd.collectors.lib.kernel.xid import CATALOGUE, UNKNOWN, Sxid, Xid, XidAction
from opsd.preflight.base import (
    Check,
    Context,
    CouldNotRunError,
    Finding,
    Measure,
    Measurement,
    Outcome,
    Progress,
    Verdict,
)  # fmt: skip

_WINDOW_S: Final = 86_400.0
_HARMLESS: Final = frozenset({XidAction.NONE, XidAction.IGNORE, XidAction.RESTART_APP, XidAction.WORKFLOW})
_FATAL: Final = frozenset(
    {
        "controller_error",
        "gpu_driver_fatal",
        "gpu_init_failed",
        "gpu_firmware_silent",
        "kernel_oops",
        "mce",
        "network_filesystem_crashed",
        "nvme_error",
        "filesystem_readonly",
        "filesystem_shutdown",
        "pcie_link_down",
        "nic_error",
    }
)
_NOTED: Final = frozenset(
    {
        "clock_unstable",
        "cpu_lockup",
        "cpu_throttled",
        "edac",
        "filesystem_error",
        "hung_task",
        "io_error",
        "pcie_error",
        "peermem_error",
        "raid_failed",
    }
)


def run(context: Context, progress: Progress) -> Outcome:
    """Read /dev/kmsg from its oldest record; messages written by processes are ignored."""
    path = Path(context.dev, "kmsg")
    try:
        device = KernelLogDevice(path)
    except OSError as error:
        raise CouldNotRunError(
            f"{path} cannot be opened ({error.strerror}); run as root, outside of containers"
        ) from error
    records, now_s = [*_records(device)], time.monotonic()
    counts, findings = judge(
        recent(records, now_s, context.gpus_renewed_at - (uptime_s() - now_s)), context.ignored_xids
    )
    return Outcome((Measurement("records", len(records)), Measurement("xids", counts)), tuple(findings))


def _records(device: KernelLogDevice) -> Iterator[LogRecord]:
    while True:
        try:
            yield parse_record(device.read())
        except BlockingIOError:
            return
        except (BrokenPipeError, ValueError):  # overwritten while reading, or not a record
            continue


def recent(records: Iterable[LogRecord], now_s: float, gpus_since_s: float) -> Iterator[str]:
    """The kernel's messages of the last day, those of GPUs only since their last reset. Seconds since boot."""
    for record in records:
        if record.facility == KERNEL and record.seconds >= now_s - _WINDOW_S:
            of_gpus = record.seconds < gpus_since_s and _of_gpus(parse_message(record.text))
            if not of_gpus:
                yield record.text


def _of_gpus(what: object) -> bool:
    return isinstance(what, (Xid, Sxid)) or (isinstance(what, Trouble) and what.kind == "gpu_init_failed")


def judge(messages: Iterable[str], ignored: Collection[int] = ()) -> tuple[int, list[Finding]]:
    """The number of Xids among ``messages`` and the problems, one finding per kind and device.

    ``ignored`` are Xids that are counted and are no problem.
    """
    xids: Counter[tuple[int, str, str]] = Counter()
    others: Counter[tuple[str, str]] = Counter()
    for text in messages:
        what = parse_message(text)
        if isinstance(what, Xid):
            xids[what.code, what.pci_bus_id, what.action] += 1
        elif isinstance(what, Sxid):
            others["sxid_" + what.severity, what.pci_bus_id] += 1
        elif isinstance(what, Trouble) and what.data.get("cause") != "Cable unplugged":
            others[what.kind, str(what.data.get("device") or what.data.get("pci_bus_id") or "")] += 1
    findings = [_xid(*key, count) for key, count in xids.items() if key[0] not in ignored]
    findings += [f for key, count in others.items() if (f := _other(*key, count)) is not None]
    return xids.total(), findings


def _xid(code: int, pci: str, action: str, count: int) -> Finding:
    verdict = Verdict.WARN if action in _HARMLESS else Verdict.FAIL
    meaning = CATALOGUE.get(code, UNKNOWN).description
    summary = f"Xid {code} on {pci} in the last day ({_times(count)}): {meaning}"
    return Finding(verdict, summary, f"NVIDIA's catalogue asks for {action.replace('_', ' ')}", pci)


def _other(kind: str, device: str, count: int) -> Finding | None:
    fatal = kind in _FATAL or kind == "sxid_fatal"
    if not fatal and kind not in _NOTED and not kind.startswith("sxid_"):
        return None
    summary = f"the kernel reported {kind}{f' of {device}' if device else ''} in the last day ({_times(count)})"
    return Finding(Verdict.FAIL if fatal else Verdict.WARN, summary, "read them with `dmesg -T`", device)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


CHECK = Check(
    name="kernel_log",
    title="Xids and hardware errors in the kernel log",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "burn-in", "spare"), 1),
    measures=(
        Measure("records", "", "number of kernel messages", "higher", noise=99),
        Measure("xids", "", "number of Xids in the last day"),
    ),
    needs=frozenset({"root"}),
    advice="a kernel log without a single message cannot be judged",
)
