"""Which processes have a GPU open: by the number of the device, whatever the name under which they have opened it.

In a container, or in a mount namespace of a user's own, the device file of a GPU may have any name (mknod(1), bind
mounts). Only the devices of GPUs count. The driver's others are open in processes that use no GPU.
Whatever has asked for the number of GPUs has ``nvidiactl`` and ``nvidia-uvm`` open, and display servers
``nvidia-modeset``. Services that manage MIG and IMEX have ``nvidia-caps`` open. A program on an instance of MIG has its
GPU open as well. Mappings without an open file are not searched, since reading the kernel's list of mappings blocks
on a process that hangs in one. The driver itself refuses a reset or an unload while there is a mapping.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from opsd.inodes import look

MAJOR: Final = 195
"""Of NVIDIA's driver, in the kernel's Documentation/admin-guide/devices.txt."""
GPU_MINORS: Final = range(248)
"""Of GPUs; those above are the driver's own (nv-chardev-numbers.h of its open modules)."""
_REGISTERED: Final = re.compile(r"^\s*(\d+) nvidia(?:-frontend)?$", re.MULTILINE)
"""In /proc/devices, by newer and by older drivers."""


def gpu_holders(proc: Path = Path("/proc")) -> Iterator[tuple[int, str]]:
    """Pid and name of every visible process with a GPU open; those of other users need root."""
    majors = _majors(proc)
    for process in proc.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            holds = any(_is_gpu(device, majors) for device in _open_devices(process))
            name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if holds:
            yield int(process.name), name


def character_device(path: str | Path) -> tuple[int, int] | None:
    """Major and minor of the character device at ``path``, None for any other file.

    Of a file on a server that does not answer the type is known here: os.stat would wait for the server.
    """
    try:
        found = look(path)
    except OSError:
        return None
    return found.device if stat.S_ISCHR(found.mode) else None


def _majors(proc: Path) -> frozenset[int]:
    with suppress(OSError):
        characters = (proc / "devices").read_text(encoding="ascii", errors="replace").partition("Block devices:")[0]
        return frozenset({MAJOR, *map(int, _REGISTERED.findall(characters))})
    return frozenset({MAJOR})


def _is_gpu(device: tuple[int, int], majors: Collection[int]) -> bool:
    return device[0] in majors and device[1] in GPU_MINORS


def _open_devices(process: Path) -> Iterator[tuple[int, int]]:
    """The character devices that a process has open. Raises OSError.

    Once its first thread has ended, its own list is empty, and that of any other thread has them.
    """
    links: Iterable[Path] = [*(process / "fd").iterdir()] or process.glob("task/*/fd/*")
    return (device for link in links if (device := character_device(link)) is not None)
