"""A simulated driver with eight GPUs, and the collector with the real pynvml over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.nvml import DriverProcess, driver_process


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[SimulatedGpus]:
    with SimulatedGpus.create(tmp_path / "gpus") as simulated:
        yield simulated


@pytest.fixture
def process(gpus: SimulatedGpus) -> Iterator[DriverProcess]:
    with driver_process({"OPSD_SIMULATED_NVML": str(gpus.path)}) as started:
        yield started


@pytest.fixture
def collector(process: DriverProcess, library: str) -> Any:
    return process.NvmlCollector(library, hostname="node")
