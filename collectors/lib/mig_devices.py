"""Which instance of MIG a set of device files opens: the numbers of capabilities that the driver lists in procfs.

The ``gpuN`` of a capability's path is not the N of ``/dev/nvidiaN``: NVIDIA/deepops#1214 shows /dev/nvidia1 with
nvidia-cap111, which is ``gpu0/mig/gi12``. The GPU is therefore that of the other file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_DEVICE: Final = re.compile(r"nvidia(\d+)")
_CAPABILITY: Final = re.compile(r"nvidia-cap(\d+)")
_ACCESS: Final = re.compile(r"^DeviceFileMinor:\s*(\d+)$", re.MULTILINE)
_MINOR: Final = re.compile(r"^Device Minor:\s*(\d+)\s*$", re.MULTILINE)


class MigDevices:
    """The driver's part of procfs below ``proc``, as it is now."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        driver = proc / "driver/nvidia"
        self._instances = {
            minor: int(path.parent.name.removeprefix("gi"))
            for path in sorted(driver.glob("capabilities/gpu*/mig/gi[0-9]*/access"))
            if (minor := _number(_ACCESS, path)) is not None
        }
        found = [_number(_MINOR, path) for path in sorted(driver.glob("gpus/*/information"))]
        self._gpus = {minor: index for index, minor in enumerate(found) if minor is not None}

    def instance(self, files: Sequence[str]) -> tuple[int, int | None] | None:
        """The GPU, by its place in the order of bus ids, and the number of its GPU instance, None for a whole GPU.

        None if the files are not of one GPU, or of one instance that there is.
        """
        gpus = {int(match[1]) for name in files if (match := _DEVICE.fullmatch(name))}
        capabilities = {int(match[1]) for name in files if (match := _CAPABILITY.fullmatch(name))}
        if len(gpus) != 1 or (gpu := self._gpus.get(gpus.pop())) is None:
            return None
        if not capabilities:
            return gpu, None
        instances = {self._instances[minor] for minor in capabilities if minor in self._instances}
        return (gpu, instances.pop()) if len(instances) == 1 else None


def has_instances(proc: Path = Path("/proc")) -> bool:
    """Whether the driver lists instances of MIG."""
    return any(True for _ in proc.glob("driver/nvidia/capabilities/gpu*/mig/gi[0-9]*/access"))


def _number(pattern: re.Pattern[str], path: Path) -> int | None:
    try:
        match = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return int(match[1]) if match else None
