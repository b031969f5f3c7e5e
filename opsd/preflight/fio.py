"""fio: measures a folder's storage with direct I/O; results in base units."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from opsd.preflight.base import CouldNotRunError

Pattern = Literal["read", "write", "randread"]
_FREE_SHARE: Final = 0.10
_MIN_FREE: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Speed:
    """What one fio job reached: bytes and operations per second, and the 99th percentile of the latency in seconds."""

    bytes_per_s: float
    operations_per_s: float
    p99_s: float


@contextlib.contextmanager
def workspace(folder: str, size: int) -> Iterator[Path]:
    """A private folder below ``folder`` that is removed afterwards. Raises CouldNotRunError if there is no room.

    fio allocates at most ``size`` bytes in it.
    """
    if shutil.which("fio") is None:
        raise CouldNotRunError("fio is not installed; apt-get install fio (or dnf install fio)")
    try:
        stats = os.statvfs(folder)
        if stats.f_bavail * stats.f_frsize * _FREE_SHARE < min(size, _MIN_FREE):
            raise CouldNotRunError(f"{folder} has only {stats.f_bavail * stats.f_frsize >> 20} MiB free; make room")
        with tempfile.TemporaryDirectory(prefix=".opsd-preflight-", dir=folder) as path:
            yield Path(path)
    except OSError as error:
        raise CouldNotRunError(f"{folder} cannot be used: {error.strerror or error}") from error


def room(folder: str, size: int) -> int:
    """``size`` bytes, or a tenth of what is free in ``folder`` if that is less. Raises OSError."""
    stats = os.statvfs(folder)
    return min(size, int(stats.f_bavail * stats.f_frsize * _FREE_SHARE))


def measure(folder: Path, pattern: Pattern, *, block: str, jobs: int, depth: int, size: int, seconds: float) -> Speed:
    """Run fio on ``jobs`` files of together ``size`` bytes for ``seconds``. Raises CouldNotRunError."""
    command = [
        "fio", "--name=preflight", f"--directory={folder}", f"--rw={pattern}", f"--bs={block}", f"--numjobs={jobs}",
        f"--size={max(size // jobs, 1 << 20)}", f"--iodepth={depth}", "--ioengine=libaio", "--direct=1",
        "--group_reporting", "--time_based", f"--runtime={max(1, round(seconds))}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * seconds, check=False, cwd=folder)
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise CouldNotRunError(f"fio failed in {folder.parent}: {reason}")
    return parse(done.stdout, "write" if pattern == "write" else "read")


def parse(text: str, direction: Literal["read", "write"]) -> Speed:
    """The speed from fio's JSON. Raises CouldNotRunError if no data was moved or the output is invalid."""
    try:
        # Warnings may stand before the JSON object.
        job: dict[str, Any] = json.loads(text[text.index("{") :])["jobs"][0]
        side = job[direction]
        p99 = side["clat_ns"]["percentile"]["99.000000"] / 1e9 if side["total_ios"] else 0.0
    except (ValueError, KeyError, IndexError) as error:
        raise CouldNotRunError(f"fio's answer cannot be read: {error!r}") from error
    if job["error"] or not side["total_ios"]:
        raise CouldNotRunError(f"fio moved no data (error {job['error']})")
    return Speed(side["bw_bytes"], side["iops"], p99)
