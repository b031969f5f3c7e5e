"""What the kernel says about a process: whether it lives, whose it is, to which Slurm job it belongs."""

from __future__ import annotations

import re
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from opsd.inodes import look

_INITIAL_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the initial PID namespace: PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h."""

DEAD: Final = (None, "Z", "X")
"""What ``process_letter`` answers for a process that runs no more."""

_PROC: Final = Path("/proc")
_JOB: Final = re.compile(
    r"(?:/[^/]+\.slice)+/[^/]*slurmstepd\.scope/(?:job_(\d+)|(s[0-9A-Z]{13}))(?:/|$)|/slurm[^/]*/uid_\d+/job_(\d+)(?:/|$)"
)
"""Slurm's control groups, v2 and v1. Matched from the root, where only root can make a group: users make groups of any
name below their own, which are in a service. Since 26.05 those of v2 have a SLUID for a name (cgroup.conf(5))."""
_SLURMD: Final = "slurmd.service"
_SERVICE: Final = re.compile(r"/system\.slice/(?:system-[^/]+\.slice/)?([^/]+\.service)(?:/|$)")
_SYSTEM_UIDS: Final = 1000
"""User ids below are no users' (login.defs(5))."""
_DYNAMIC_UIDS: Final = range(61184, 65520)
"""User ids that systemd gives to services with DynamicUser=, and to nobody else (its UIDS-GIDS.md)."""


class Identity(NamedTuple):
    """Real user id of a process, and the Slurm job in whose control group it is, by its number or SLUID, "" outside."""

    user: int
    job: str


def identify(pid: int, proc: Path = _PROC) -> Identity | None:
    """Whose process this is, None if it is gone (proc_pid_status(5), cgroups(7))."""
    user = user_of(pid, proc)
    try:
        return None if user is None else Identity(user, slurm_job(read_kernel_text(f"{proc}/{pid}/cgroup")))
    except OSError:
        return None


def user_of(pid: int, proc: Path = _PROC) -> int | None:
    """The real user id of a process, None if it is gone."""
    try:
        return int(read_kernel_text(f"{proc}/{pid}/status").partition("\nUid:")[2].split(maxsplit=1)[0])
    except (OSError, ValueError, IndexError):
        return None


def read_kernel_text(path: str | Path) -> str:
    """A file of procfs, whose lines end with a line feed and nothing else. Raises OSError.

    Users name processes, control groups and mount points. The kernel escapes a line feed in these names and leaves a
    carriage return, at which Python's text mode begins a new line, as ``str.splitlines`` does at many a character.
    """
    with open(path, "rb", buffering=0) as file:
        return file.read().decode(errors="replace")


def service_of(pid: int, proc: Path = _PROC) -> str:
    """The service of the system that systemd started the process for, "" for a user's, a scope's or none.

    Root's containers are scopes in the same slice. A job's processes are in the service of slurmd where Slurm makes no
    control groups, and those of cron's and at's users in that of cron and atd.
    """
    try:
        groups = read_kernel_text(f"{proc}/{pid}/cgroup").rstrip("\n").split("\n")
    except OSError:
        return ""
    match = _SERVICE.match(groups[-1].split(":", 2)[-1])
    return match[1] if match else ""


def is_service(pid: int, named: Collection[str] = (), proc: Path = _PROC) -> bool:
    """Whether it is a service's own, or in one of the ``named``; with a person's user id it may as well be a job's.

    So may root's in the service of slurmd, but for slurmd itself.
    """
    unit = service_of(pid, proc)
    known = unit in named or unit.removesuffix(".service") in named
    of_job = unit == _SLURMD and _name(pid, proc) != "slurmd"
    return bool(unit) and (known or (is_of_system(user_of(pid, proc)) and not of_job))


def _name(pid: int, proc: Path) -> str:
    try:
        return read_kernel_text(f"{proc}/{pid}/comm").rstrip("\n")
    except OSError:
        return ""


def is_dynamic(user: int | None) -> bool:
    """Whether systemd has made this user id for a service."""
    return user in _DYNAMIC_UIDS


def is_of_system(user: int | None) -> bool:
    """Whether this user id is a service's and no person's."""
    return user is not None and (user < _SYSTEM_UIDS or is_dynamic(user))


def slurm_job(groups: str) -> str:
    """The Slurm job in the content of /proc/PID/cgroup, by its number or SLUID, "" if there is none."""
    return next((job for line in groups.split("\n") if (job := job_of_group(line.split(":", 2)[-1]))), "")


def job_of_group(path: str) -> str:
    """The Slurm job, by number or SLUID, whose control group has this path below the root, "" if it is no job's."""
    match = _JOB.match(path)
    return str(match[match.lastindex or 0]) if match else ""


def process_letter(pid: int, proc: Path = _PROC) -> str | None:
    """The kernel's state letter of a process (proc_pid_stat(5)), None if it is gone."""
    try:
        return read_kernel_text(f"{proc}/{pid}/stat").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def start_time(pid: int, proc: Path = _PROC) -> int | None:
    """When a process began, in clock ticks since boot (proc_pid_stat(5)); None if it is gone."""
    try:
        return int(read_kernel_text(f"{proc}/{pid}/stat").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def sees_all_processes(proc: Path = _PROC) -> bool:
    """False in a container with processes of its own, where the numbers that a driver gives mean nothing."""
    try:
        return (proc / "self/ns/pid").stat().st_ino == _INITIAL_NAMESPACE
    except OSError:
        return False


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
