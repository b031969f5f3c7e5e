"""Preflight reports for tests."""

from __future__ import annotations

from opsd.preflight.base import Finding, Verdict
from opsd.preflight.report import Report, Result, Value

GEMM = Result(
    "gpu_burn",
    "GPU burn",
    Verdict.FAIL,
    values=(
        Value("throughput", "GPU 0", 730e12, "flops", Verdict.PASS, 729e12, "higher"),
        Value("throughput", "GPU 1", 540e12, "flops", Verdict.FAIL, 730e12, "higher"),
    ),
    findings=(Finding(Verdict.FAIL, "GPU 1: throughput is 540 TFLOP/s, 26% below the best", "drain the node"),),
    started=1000.0,
    seconds=12.5,
    runbook="gpu_throttle",
    log="/var/lib/opsd/preflight-logs/gpu_burn.log",
)
CLOCK = Result(
    "clock", "Clock", Verdict.WARN, findings=(Finding(Verdict.WARN, "no <service> keeps the clock", "start chronyd"),)
)
DISK = Result("storage", "Storage", Verdict.COULD_NOT_RUN, reason="fio is not installed; apt-get install fio")
LEFTOVERS = Result(
    "leftovers",
    "Processes and shared memory left by earlier jobs",
    Verdict.FAIL,
    values=(Value("stale_shm", "", 0.0, "bytes", Verdict.PASS, 4 << 30, "lower"),),
    findings=(Finding(Verdict.FAIL, "process 4242 (python) holds a GPU open", "end it: kill 4242"),),
)
FULL_MEMORY = Result(
    "leftovers",
    LEFTOVERS.title,
    Verdict.FAIL,
    values=(Value("stale_shm", "", 80 << 30, "bytes", Verdict.FAIL, 64 << 30, "lower"),),
    findings=(Finding(Verdict.FAIL, "Old files in /dev/shm is 86 GB", "remove what dead jobs left in /dev/shm"),),
)
ABSENT = Result("infiniband", "InfiniBand", Verdict.NOT_APPLICABLE, reason="no adapter")
VERSIONS = Result("versions", "Versions", Verdict.PASS, facts={"kernel": "6.8", "NCCL": "2.27"}, started=999.0)


def report(*results: Result, node: str = "node-1", started: float = 1000.0, **fields) -> Report:
    """A report of the quick profile that took 20 s."""
    return Report(node, "quick", "1.2.3", started, started + 20, results, **fields)
