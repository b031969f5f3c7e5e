"""A simulated driver with eight GPUs, and the collector with the real pynvml over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opsd.simulated.gpus import NoCompilerError, SimulatedGpus, build
from tests.fakes.nvml import DriverProcess, driver_process


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The simulated driver library, built once."""
    try:
        return str(build(tmp_path_factory.mktemp("nvml")))
    except NoCompilerError as error:
        pytest.skip(str(error))


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
