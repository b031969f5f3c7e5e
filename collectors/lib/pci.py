"""PCI addresses: the kernel, sysfs and the NVIDIA driver each write them in their own way."""

from __future__ import annotations

from typing import Final

ADDRESS: Final = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
"""Pattern of a PCI address with domain, with or without the function."""


def bus_id(address: str) -> str:
    """``address`` ("0000:3b:00", "0000:3b:00.0") in NVML's form, "00000000:3B:00.0", which all labels use."""
    domain, bus, device = address.split(":")
    slot, _, function = device.partition(".")
    return f"{int(domain, 16):08X}:{bus.upper()}:{slot.upper()}.{function or '0'}"
