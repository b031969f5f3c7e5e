"""A device file that counts as a GPU's where no driver is loaded."""

from __future__ import annotations

from pathlib import Path


def gpu_device(proc: Path) -> str:
    """The name of a device file of everybody's, whose number has the driver of the procfs below ``proc``."""
    (proc / "devices").write_text(
        "Character devices:\n  1 nvidia\n  4 tty\n195 nvidiactl\n\nBlock devices:\n  5 nvidia\n"
    )
    return "/dev/zero"
