"""Checks, reports and nodes for tests of the preflight.

Pieces of a node for the preflight: a GPU on its PCI bus.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from opsd.preflight.base import (
    Check,
    Context,
    CouldNotRunError,
    Finding,
    Measure,
    Measurement,
    NotApplicableError,
    Outcome,
    Progress,
    Verdict,
)
from opsd.preflight.report import Report, Result, Value


def with_gpu(sys_root: Path) -> None:
    """One H100 below ``sys_root``, which stands for /sys."""
    device = sys_root / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n", encoding="ascii")
    (device / "class").write_text("0x030200\n", encoding="ascii")


# Preflight reports for tests.


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


# Checks that behave, and checks that misbehave, for tests of the preflight engine.


SPEED = Measure("speed", "bytes_per_second", "speed", better="higher")


def make(name: str, run, needs=frozenset(), seconds: float = 0.0, measures=()) -> Check:
    """A check of the quick profile."""
    return Check(
        name, f"The {name} check", run, {"quick": seconds}, measures=measures, needs=needs, advice="replace it"
    )


def good(context: Context, progress: Progress) -> Outcome:
    progress(0.5, "GPU 0")
    print("libraries print what they like")
    return Outcome(
        (Measurement("speed", 100.0, "GPU 0"), Measurement("speed", 101.0, "GPU 1")), facts={"color": "blue"}
    )


def warns(context: Context, progress: Progress) -> Outcome:
    return Outcome(findings=(Finding(Verdict.WARN, "it looks odd", "look closer"),))


def fails(context: Context, progress: Progress) -> Outcome:
    return Outcome(findings=(Finding(Verdict.FAIL, "it is broken"),))


def not_applicable(context: Context, progress: Progress) -> Outcome:
    raise NotApplicableError("there is nothing to look at")


def could_not_run(context: Context, progress: Progress) -> Outcome:
    raise CouldNotRunError("the tool is missing; install it")


def measures_nothing(context: Context, progress: Progress) -> Outcome:
    return Outcome()


def raises(context: Context, progress: Progress) -> Outcome:
    raise ZeroDivisionError("division by zero")


def killed(context: Context, progress: Progress) -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)
    return Outcome()


def out_of_memory(context: Context, progress: Progress) -> Outcome:
    """As if by the kernel: its counter goes up, the process gets SIGKILL."""
    Path(context.proc, "vmstat").write_text("oom_kill 4\n", encoding="ascii")
    os.kill(os.getpid(), signal.SIGKILL)
    return Outcome()


def hangs(context: Context, progress: Progress) -> Outcome:
    """Ignores SIGTERM and leaves a child in another process group; both pids are in the file named by local_dir."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    with open(context.settings.local_dir, "a", encoding="ascii") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    print("waiting for a driver that never answers", file=sys.stderr)
    time.sleep(600)
    return Outcome()


def leaves_files(context: Context, progress: Progress) -> Outcome:
    """Waits in a folder of its own below the one named by local_dir, until it is told to end."""
    with tempfile.TemporaryDirectory(dir=context.settings.local_dir) as folder:
        Path(folder, "large").touch()
        time.sleep(600)
    return Outcome()


GOOD = make("good", good, measures=(SPEED,))
WARNS = make("warns", warns)
FAILS = make("fails", fails)
NOT_APPLICABLE = make("not_applicable", not_applicable)
COULD_NOT_RUN = make("could_not_run", could_not_run)
MEASURES_NOTHING = make("measures_nothing", measures_nothing, measures=(SPEED,))
RAISES = make("raises", raises)
KILLED = make("killed", killed)
OUT_OF_MEMORY = make("out_of_memory", out_of_memory)
HANGS = make("hangs", hangs)
LEAVES_FILES = make("leaves_files", leaves_files)
NEEDS_GPU = make("needs_gpu", good, needs=frozenset({"gpu"}), measures=(SPEED,))
NEEDS_TORCH = make("needs_torch", good, needs=frozenset({"gpu", "torch"}), measures=(SPEED,))
OF_THE_RUN = make("of_the_run", good, needs=frozenset({"run", "torch"}), measures=(SPEED,))
SPEED_ONE = make("speed_one", good, needs=frozenset({"exclusive"}), measures=(SPEED,))
