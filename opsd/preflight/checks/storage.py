"""Local (scratch NVMe) and shared storage (Lustre, Weka, NFS …), measured with fio and direct I/O.

Compared with what the run needs: tokens per second times bytes per token, checkpoint size per interval.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from opsd.preflight.base import (
    Check,
    Context,
    CouldNotRunError,
    Demand,
    Finding,
    Measure,
    Measurement,
    NotApplicableError,
    Outcome,
    Progress,
    Verdict,
    duration,
    quantity,
)

_SIZE: Final = 1 << 30
READ_MARGIN: Final = 3.0
"""The data loader must be able to catch up after a stall: three times the rate that the run consumes."""
CHECKPOINT_SHARE: Final = 0.25
"""A checkpoint that takes longer than this share of its interval will at times overlap the next one."""


def run_local(context: Context, progress: Progress) -> Outcome:
    """Measure the configured folder, or the one for temporary files."""
    return run(context, progress, context.settings.local_dir or tempfile.gettempdir())


def run_shared(context: Context, progress: Progress) -> Outcome:
    """Measure the configured folder."""
    if not context.settings.shared_dir:
        raise NotApplicableError("preflight.shared_dir is not configured")
    return run(context, progress, context.settings.shared_dir)


def run(context: Context, progress: Progress, folder: str) -> Outcome:
    """Write, read and read at random in ``folder`` for a third of the time each, then compare with the demand."""
    seconds = context.seconds / 3
    with workspace(folder, _SIZE) as path:
        size = room(folder, _SIZE)
        write = measure(path, "write", block="1m", jobs=2, depth=16, size=size, seconds=seconds)
        progress(1 / 3, "")
        read = measure(path, "read", block="1m", jobs=2, depth=16, size=size, seconds=seconds)
        progress(2 / 3, "")
        random = measure(path, "randread", block="16k", jobs=2, depth=16, size=size, seconds=seconds)
    return Outcome(
        (
            Measurement("write", write.bytes_per_s),
            Measurement("read", read.bytes_per_s),
            Measurement("random_read", random.operations_per_s),
            Measurement("random_read_p99", random.p99_s),
        ),
        tuple(needs(context.demand, folder, read=read.bytes_per_s, write=write.bytes_per_s)),
    )


def needs(demand: Demand, folder: str, *, read: float, write: float) -> Iterator[Finding]:
    """The findings where ``folder`` is too slow for the run. ``read`` and ``write`` are bytes per second."""
    if demand.tokens_per_s:
        consumed = demand.tokens_per_s * demand.bytes_per_token
        verdict = Verdict.FAIL if read < consumed else Verdict.WARN
        if read < consumed * READ_MARGIN:
            reads, wants = quantity(read, "bytes_per_second"), quantity(consumed, "bytes_per_second")
            summary = f"{folder} reads {reads}, {read / consumed:.1f} times the {wants} that the run consumes"
            advice = f"{READ_MARGIN:g} times leave room to catch up: stage the shards on local NVMe"
            yield Finding(verdict, summary, advice)
    if demand.checkpoint_bytes and demand.checkpoint_interval_s:
        took = demand.checkpoint_bytes / write
        share = took / demand.checkpoint_interval_s
        if share > CHECKPOINT_SHARE:
            verdict = Verdict.FAIL if share >= 1 else Verdict.WARN
            size, interval = quantity(demand.checkpoint_bytes, "bytes"), duration(demand.checkpoint_interval_s)
            summary = (
                f"a checkpoint of {size} takes {folder} {duration(took)}, {share:.0%} of its interval of {interval}"
            )
            yield Finding(verdict, summary, "write less often, to faster storage, or from more nodes at once")


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


LOCAL = Check(
    name="storage_local",
    title="Local storage",
    run=run_local,
    seconds={"quick": 6, "standard": 30, "burn-in": 300, "spare": 30},
    measures=(
        Measure("write", "bytes_per_second", "write bandwidth", "higher", noise=0.25),
        Measure("read", "bytes_per_second", "read bandwidth", "higher", noise=0.25),
        Measure("random_read", "operations_per_second", "16 KiB random reads", "higher", noise=0.25),
        Measure("random_read_p99", "seconds", "latency of 16 KiB random reads (p99)", "lower", noise=1.0),
    ),
    needs=frozenset({"exclusive"}),
    advice="look at `nvme smart-log` for wear and temperature, and at other users of the disk with iotop",
)
SHARED = replace(
    LOCAL,
    name="storage_shared",
    title="Shared storage",
    run=run_shared,
    needs=frozenset({"exclusive", "network"}),
    advice="compare with another node at the same time: if all are slow it is the storage, otherwise this node's mount",
)
