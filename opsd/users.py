"""User ids where they may be mapped: containers of pyxis, enroot, Apptainer and Podman are in a user namespace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_EVERYBODY: Final = [b"0", b"0", b"4294967295"]


def in_user_namespace(process: Path = Path("/proc/self")) -> bool:
    """Whether this process sees other user ids than the machine has, so that 0 is not the machine's root."""
    try:
        return (process / "uid_map").read_bytes().split() != _EVERYBODY
    except OSError:  # a kernel without user namespaces
        return False


def unmapped_uid(system: Path = Path("/proc/sys/kernel")) -> int | None:
    """The id of unmapped users of the machine, root among them; None outside a user namespace."""
    return int((system / "overflowuid").read_bytes()) if in_user_namespace() else None


def machine_uid(process: Path = Path("/proc/self")) -> int:
    """This user's id outside its user namespace (user_namespaces(7)): another for each user, also where all are 0."""
    uid = os.getuid()
    try:
        lines = (process / "uid_map").read_bytes().splitlines()
    except OSError:
        return uid
    for inside, outside, count in (map(int, line.split()) for line in lines):
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid
