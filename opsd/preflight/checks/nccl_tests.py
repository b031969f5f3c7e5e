"""NVIDIA's all_reduce_perf (nccl-tests), if it is installed: a second measurement of the collectives."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Final, NamedTuple

from opsd.preflight import gpus
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
    quantity,
)

_HALF: Final = r"\s+(\d+(?:\.\d+)?)\s+(\d+(?:\.\d+)?)\s+(\d+(?:\.\d+)?)\s+(\d+|N/A)"
"""Microseconds, algbw and busbw in GB/s, wrong elements; a row has one such half out of place and one in place."""
_ROW: Final = re.compile(rf"^\s*(\d+)\s+\d+\s+\S+\s+\S+\s+-?\d+{_HALF}{_HALF}\s*$", re.MULTILINE)


class NcclRow(NamedTuple):
    """One size of an nccl-tests run, the better of out of place and in place, in bytes and seconds."""

    size: int
    seconds: float
    algbw: float
    busbw: float
    wrong: int


def parse(text: str) -> list[NcclRow]:
    """The rows of an nccl-tests table; lines of NCCL itself between them are skipped.

    Raises CouldNotRunError if there are none or the output is incomplete.
    """
    rows = []
    for size, *halves in _ROW.findall(text):
        best = min(halves[:4], halves[4:], key=lambda half: float(half[0]))
        seconds, algbw, busbw = float(best[0]) * 1e-6, float(best[1]) * 1e9, float(best[2]) * 1e9
        wrong = sum(int(half[3]) for half in (halves[:4], halves[4:]) if half[3] != "N/A")
        rows.append(NcclRow(int(size), seconds, algbw, busbw, wrong))
    if not rows or "# Avg bus bandwidth" not in text:
        lines = [line for line in text.splitlines() if "error" in line.lower() or "failure" in line.lower()]
        raise CouldNotRunError(f"nccl-tests did not finish{': ' + lines[-1].strip() if lines else ''}")
    return rows


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
    return outcome(parse(done.stdout + done.stderr))


def outcome(rows: list[NcclRow]) -> Outcome:
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
