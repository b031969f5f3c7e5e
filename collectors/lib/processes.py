"""Looking a process up by its number."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_INITIAL_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the initial PID namespace: PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h."""

DEAD: Final = (None, "Z", "X")
"""What ``process_letter`` answers for a process that runs no more."""


def process_letter(pid: int, proc: Path = Path("/proc")) -> str | None:
    """The kernel's state letter of a process (proc_pid_stat(5)), None if it is gone."""
    try:
        return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def sees_all_processes(proc: Path = Path("/proc")) -> bool:
    """False in a container with processes of its own, where the numbers that a driver gives mean nothing."""
    try:
        return (proc / "self/ns/pid").stat().st_ino == _INITIAL_NAMESPACE
    except OSError:
        return False
