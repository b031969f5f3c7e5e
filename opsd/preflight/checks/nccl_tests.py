"""NVIDIA's all_reduce_perf (nccl-tests), if it is installed: a second measurement of the collectives."""

from __future__ import annotations

import shutil
import subprocess

from opsd.preflight import gpus, tools
from opsd.preflight.base import (
    Bounds,
    Check,
    Context,
    CouldNotRunError,
    Measure,
    Measurement,
    NotApplicableError,
    Outcome,
    Progress,
)
from opsd.preflight.units import quantity


def run(context: Context, progress: Progress) -> Outcome:
    """All-reduce over all GPUs of the node, 1 KiB to 8 GiB, results checked."""
    if shutil.which("all_reduce_perf") is None:
        raise NotApplicableError("nccl-tests is not installed")
    count = len(gpus.look(context).gpus)
    command = ["all_reduce_perf", "--ngpus", str(count), "-b", "1K", "-e", "8G", "-f", "8", "--check", "1"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 3 * context.seconds, check=False)
    except subprocess.TimeoutExpired:
        raise CouldNotRunError("all_reduce_perf did not end; look for NCCL's warnings with NCCL_DEBUG=WARN") from None
    return outcome(tools.nccl_tests(done.stdout + done.stderr))


def outcome(rows: list[tools.NcclRow]) -> Outcome:
    """Bus bandwidth by size, and the number of wrong elements."""
    measured = (Measurement("busbw", row.busbw, quantity(row.size, "bytes")) for row in rows)
    return Outcome((*measured, Measurement("wrong", sum(row.wrong for row in rows))))


CHECK = Check(
    name="nccl_tests",
    title="NVIDIA's all_reduce_perf",
    run=run,
    seconds={"standard": 60, "spare": 60},
    measures=(
        Measure("busbw", "bytes_per_second", "all-reduce bus bandwidth", "higher", noise=0.05),
        Measure("wrong", "", "wrong elements", "lower", Bounds(fail=0)),
    ),
    needs=frozenset({"gpu", "exclusive"}),
    advice="compare with the check collectives: if both are slow it is the fabric",
    runbook="nvlink_errors",
)
