"""``opsd launch`` on ranks that only wait for simulated GPUs: work is no hang, a kernel that spins is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.clock import eventually
from tests.fakes.launched import Launched

pytestmark = pytest.mark.slow

WAITS = """
import os, time
open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(1000)
"""


def test_only_a_gpu_at_work_excuses_idle_processes(tmp_path: Path, library: str) -> None:
    """Neither rank uses the CPU, and the limit is 3 s; their GPUs work for 7 s, then the kernel of one waits."""
    with SimulatedGpus.create(tmp_path / "gpus", count=2) as gpus:
        flags = ("--nproc-per-node=2", "--no-standby", "--idle-limit=3")
        with Launched(tmp_path, WAITS, *flags, env=gpus.environment(Path(library))) as launched:
            files = [tmp_path / f"pid-{rank}" for rank in range(2)]
            assert eventually(lambda: all(file.exists() and file.read_text() for file in files), 60)
            for gpu, file in zip(gpus, files, strict=True):
                gpu.set_processes([(int(file.read_text()), 1 << 30)])
                gpu.load(utilization=100, power_watts=600)
            time.sleep(7.0)
            assert not launched.events("hang_detected")
            gpus[1].load(utilization=0, power_watts=100)
            gpus[0].memory_utilization = 0
            assert launched.wait() == exitcodes.OK
            (hang,) = launched.events("hang_detected")
            assert hang["rank"] == 1
            assert "GPU 1 runs no kernel" in hang["evidence"]
