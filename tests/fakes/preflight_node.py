"""Pieces of a node for the preflight: a GPU on its PCI bus."""

from __future__ import annotations

from pathlib import Path


def with_gpu(sys_root: Path) -> None:
    """One H100 below ``sys_root``, which stands for /sys."""
    device = sys_root / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n", encoding="ascii")
    (device / "class").write_text("0x030200\n", encoding="ascii")
