"""PCI addresses: the kernel, sysfs and the NVIDIA driver each write them in their own way."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from opsd.collectors.base import Metric, Sample
from opsd.collectors.lib.processes import sees_all_processes

ADDRESS: Final = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
"""Pattern of a PCI address with domain, with or without the function."""


def bus_id(address: str) -> str:
    """``address`` ("0000:3b:00", "0000:3b:00.0") in NVML's form, "00000000:3B:00.0", which all labels use."""
    domain, bus, device = address.split(":")
    slot, _, function = device.partition(".")
    return f"{int(domain, 16):08X}:{bus.upper()}:{slot.upper()}.{function or '0'}"


ON_BUS = Metric(
    "opsd_host_gpu_on_bus_info",
    "A GPU of NVIDIA on the PCI bus: the kernel driver that has it, whether it is a display adapter or only computes, "
    "and yes if the driver was told to leave it out.",
    "info",
    labels=("pci_bus_id", "driver", "display", "excluded"),
)
RELEASES = Metric(
    "opsd_host_gpu_driver_info",
    "Release of NVIDIA's kernel module that is loaded, and of the library on the disk; empty: there is none.",
    "info",
    labels=("module", "library"),
)
METRICS: Final = (ON_BUS, RELEASES)
LABELS: Final = {
    "pci_bus_id": "GPUs on the bus, 32 at most",
    "driver": "one per GPU on the bus",
    "display": "yes and no",
    "excluded": "yes and no",
    "module": "one",
    "library": "one",
}

_NVIDIA, _DISPLAY, _COMPUTE = "0x10de", "0x0300", "0x0302"
"""Vendor, and the two classes of its GPUs: with and without a display (PCI Code and ID Assignment, base class 3)."""

_MOST: Final = 32
_LIBRARIES: Final = ("usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib")
_RELEASE = re.compile(r"libnvidia-ml\.so\.(\d+\.\d+(?:\.\d+)?)$")


class GpuBus:
    """The GPUs below ``sys``, and the files of the driver below ``root``.

    A container with processes of its own sees the node's bus, but not all of its GPUs: there it says nothing.
    """

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys"), root: Path = Path("/")) -> None:
        self._proc, self._sys, self._root = proc, sys, root
        self._classes: dict[str, str] = {}
        self._whole = sees_all_processes(proc)

    def samples(self) -> Iterator[Sample]:
        """One of each GPU and one of the driver, where there are any."""
        if not self._whole:
            return
        gpus = [name for name in self._devices() if self._class_of(name)]
        for name in gpus[:_MOST]:
            link = self._sys / "bus/pci/devices" / name / "driver"
            display = "yes" if self._classes[name] == _DISPLAY else "no"
            excluded = "yes" if self._excluded(name) else "no"
            yield Sample(ON_BUS, 1, (bus_id(name), link.resolve().name if link.exists() else "", display, excluded))
        module = _text(self._sys / "module/nvidia/version")
        if gpus or module:
            yield Sample(RELEASES, 1, (module, self._library() if self._hosts_own_files() else ""))

    def _devices(self) -> list[str]:
        try:
            return sorted(folder.name for folder in (self._sys / "bus/pci/devices").iterdir())
        except OSError:
            return []

    def _class_of(self, name: str) -> str:
        """The class of a GPU of NVIDIA, "" of another device. Virtual functions of a GPU are none of the node's."""
        if name not in self._classes:
            folder = self._sys / "bus/pci/devices" / name
            kind = _text(folder / "class")[:6]
            gpu = kind in (_DISPLAY, _COMPUTE) and _text(folder / "vendor") == _NVIDIA
            self._classes[name] = kind if gpu and not (folder / "physfn").exists() else ""
        return self._classes[name]

    def _excluded(self, name: str) -> bool:
        told = _text(self._proc / "driver/nvidia/gpus" / name / "information")
        return re.search(r"^GPU Excluded:\s*Yes", told, re.MULTILINE) is not None

    def _library(self) -> str:
        """Release of the library that a program started now would load."""
        for folder in _LIBRARIES:
            with contextlib.suppress(OSError):
                if match := _RELEASE.search(str((self._root / folder / "libnvidia-ml.so.1").readlink())):
                    return match[1]
        return ""

    def _hosts_own_files(self) -> bool:
        """Whether the agent's root is that of the node, not that of a container that sees the node's processes."""
        own, first = (_root_of(_text(self._proc / who / "mountinfo")) for who in ("self", "1"))
        return own is not None and own == first


def _root_of(mountinfo: str) -> tuple[str, ...] | None:
    """Device and folder that are mounted as the root (proc_pid_mountinfo(5))."""
    fields = [line.split(maxsplit=5) for line in mountinfo.splitlines()]
    roots = [(line[2], line[3]) for line in fields if len(line) > 5 and line[4] == "/"]
    return roots[-1] if roots else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
