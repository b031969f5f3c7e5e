"""What earlier jobs left behind: processes that hold GPUs or their memory, and files in /dev/shm."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from opsd.collectors.lib.processes import gpu_holders, is_of_system, is_service, user_of
from opsd.inodes import look
from opsd.preflight.base import Bounds, Check, Context, Finding, Measure, Measurement, Outcome, Progress, Verdict
from opsd.rundir import KEEP_FINISHED_S

_SYSTEM: Final = frozenset({"nvidia-persiste", "nv-fabricmanage", "dcgm", "nv-hostengine", "dcgm-exporter", "opsd"})
"""Process names, cut at 15 characters as the kernel does, that may hold a GPU open if they are no user's."""
_OLD_S: Final = 600.0


def run(context: Context, progress: Progress) -> Outcome:
    """Search /proc for open GPUs, and /dev/shm for files that were not written for ten minutes."""
    proc = Path(context.proc)
    holders = [
        (pid, name)
        for pid, name in gpu_holders(proc)
        if not (_may_hold(name, user_of(pid, proc)) or is_service(pid, context.services, proc))
    ]
    stale, files, kept = _old_bytes(Path(context.dev, "shm"), time.time())
    findings = [
        Finding(Verdict.FAIL, f"process {pid} ({name}) holds a GPU open", f"end it: kill {pid}; then kill -9 {pid}")
        for pid, name in holders
    ]
    return Outcome(
        (
            Measurement("gpu_processes", len(holders)),
            Measurement("stale_shm", stale),
            Measurement("stale_shm_files", files),
            Measurement("kept_shm", kept),
        ),
        tuple(findings),
    )


def _may_hold(name: str, user: int | None) -> bool:
    """Whether it is what its name says, which anybody can choose; in a container it need not be a service."""
    return name in _SYSTEM and (is_of_system(user) or user == os.getuid())


def _old_bytes(folder: Path, now: float) -> tuple[int, int, int]:
    """Size and number of the files below ``folder`` last written more than ten minutes ago, and bytes kept on purpose.

    The launcher keeps checkpoints in memory there for a limited time, from which a requeued run resumes. Mounts of
    users there are left out, because they may never answer.
    """
    stale = files = kept = 0
    mount = look(folder).mount if folder.exists() else None
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if _mount_of(Path(base, name)) == mount]
        is_run = Path(base).is_relative_to(folder / "opsd")
        for name in names:
            try:
                if _mount_of(path := Path(base, name)) != mount:
                    continue
                status = path.lstat()
            except OSError:
                continue
            if now - status.st_mtime > (KEEP_FINISHED_S if is_run else _OLD_S):
                stale, files = stale + status.st_blocks * 512, files + 1
            elif is_run:
                kept += status.st_blocks * 512
    return stale, files, kept


def _mount_of(path: Path) -> tuple[int, int] | None:
    try:
        return look(path, follow=False).mount
    except OSError:
        return None


CHECK = Check(
    name="leftovers",
    title="Processes and shared memory left by earlier jobs",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "spare"), 2),
    measures=(
        Measure("gpu_processes", "", "processes that hold a GPU"),
        Measure("stale_shm", "bytes", "old files in /dev/shm", "lower", Bounds(warn=4 << 30, fail=64 << 30), noise=99),
        Measure("stale_shm_files", "", "number of old files in /dev/shm"),
        Measure("kept_shm", "bytes", "memory of runs that may go on here, in /dev/shm/opsd"),
    ),
    advice="remove what dead jobs left in /dev/shm; `ls -lt /dev/shm` shows it",
)
