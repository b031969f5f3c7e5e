"""Bounds that training jobs hit: locked memory, open files, processes, shared memory."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from opsd.preflight.base import (
    Bounds,
    Check,
    Context,
    Finding,
    Measure,
    Measurement,
    Outcome,
    Progress,
    Verdict,
    quantity,
)

_GIB: Final = 1 << 30
_WANTED_FILES: Final = 65_536
_WANTED_PROCESSES: Final = 16_384


class Found(NamedTuple):
    """Soft limits of this process, None for unlimited, and bytes free in shared memory."""

    memlock: int | None
    files: int | None
    processes: int | None
    shm_free: int
    rdma: bool


def run(context: Context, progress: Progress) -> Outcome:
    """Read the limits of a process started from here."""
    found = Found(
        memlock=_soft(resource.RLIMIT_MEMLOCK),
        files=_soft(resource.RLIMIT_NOFILE),
        processes=_soft(resource.RLIMIT_NPROC),
        shm_free=shutil.disk_usage(Path(context.dev, "shm")).free,
        rdma=any(Path(context.sys).glob("class/infiniband/*")),
    )
    return Outcome((Measurement("shm_free", found.shm_free),), tuple(judge(found)), {"memlock": _text(found.memlock)})


def judge(found: Found) -> Iterator[Finding]:
    """The limits that are too low. Locked memory fails only if RDMA needs it."""
    if found.memlock is not None:
        verdict = Verdict.FAIL if found.rdma else Verdict.WARN
        summary = f"locked memory is limited to {_text(found.memlock)}; RDMA and pinned buffers register gigabytes"
        yield Finding(
            verdict, summary, "LimitMEMLOCK=infinity for slurmd (PropagateResourceLimits=NONE) and limits.conf"
        )
    if found.files is not None and found.files < _WANTED_FILES:
        summary = f"only {found.files:,} open files are allowed, shards and sockets want {_WANTED_FILES:,}"
        yield Finding(Verdict.WARN, summary, "set LimitNOFILE=1048576 for slurmd")
    if found.processes is not None and found.processes < _WANTED_PROCESSES:
        summary = (
            f"only {found.processes:,} processes and threads are allowed, ranks and loaders want {_WANTED_PROCESSES:,}"
        )
        yield Finding(Verdict.WARN, summary, "LimitNPROC=infinity for slurmd and limits.conf")


def _soft(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _text(limit: int | None) -> str:
    return "unlimited" if limit is None else quantity(limit, "bytes")


CHECK = Check(
    name="limits",
    title="Bounds on memory locking, files, processes and /dev/shm",
    run=run,
    seconds=dict.fromkeys(("quick", "standard", "burn-in", "spare"), 1),
    measures=(
        Measure(
            "shm_free", "bytes", "free space in /dev/shm", "higher", Bounds(warn=8 * _GIB, fail=1 * _GIB), noise=99
        ),
    ),
    advice="NCCL and dataloaders need it: remove what dead jobs left there, or give the container --shm-size",
)
