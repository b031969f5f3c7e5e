"""Checks for real: GPUs over the simulated driver, storage with fio, processor and memory of this machine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from rich.console import Console

from opsd.collectors.lib.nvml.gpu import REASONS
from opsd.preflight import series
from opsd.preflight.base import Check, Context, Demand, Verdict
from opsd.preflight.checks import cpu, gpu_health, gpu_inventory, memory, storage
from opsd.preflight.checks.run_steps import MemoryUse
from opsd.preflight.engine import CheckRun, run
from opsd.preflight.report import Result
from opsd.preflight.view import PlainView
from opsd.preflight.watch import Watch
from opsd.settings.sections import PreflightSettings
from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.clock import eventually


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpus]:
    with SimulatedGpus.create(tmp_path / "gpus") as simulated:
        monkeypatch.setenv("OPSD_SIMULATED_NVML", str(simulated.path))
        yield simulated


@pytest.fixture
def look(library: str, gpus: SimulatedGpus, tmp_path: Path) -> Callable[[Check], Result]:
    """Run one check in its own process against the simulated GPUs."""
    context = Context("node-1", "quick", 0.0, settings=PreflightSettings(gpus=8), nvml_library=library)
    return lambda check: one(check, context, tmp_path)


def one(check: Check, context: Context, folder: Path, seconds: float = 1.0) -> Result:
    job = CheckRun([check], context, folder, seconds={check.name: seconds})
    return asyncio.run(run(job, PlainView(Console(quiet=True)))).results[0]


def test_eight_healthy_gpus_pass(look: Callable[[Check], Result]):
    """Inventory and health, with the identity of every GPU kept for the next run."""
    inventory, health = look(gpu_inventory.CHECK), look(gpu_health.CHECK)
    assert (inventory.verdict, health.verdict) == (Verdict.PASS, Verdict.PASS), (inventory, health)
    assert len({uuid for name, uuid in inventory.facts.items() if name.startswith("GPU ")}) == 8
    assert inventory.facts["GPUs"].startswith("8 x ")
    assert {value.subject for value in health.values if value.measure == "temperature"} == {
        f"GPU {index}" for index in range(8)
    }


def test_the_nvlink_domain_of_a_rack_is_told(look: Callable[[Check], Result], gpus: SimulatedGpus):
    """Once all GPUs are in it, and none where the fabric ends in the node."""
    rack = UUID("5e797fc6-0f46-421a-8724-0e102c0f723c")
    for gpu in [*gpus][:7]:
        gpu.set_domain(rack, 1234)
    assert gpu_inventory.DOMAIN not in look(gpu_inventory.CHECK).facts
    gpus[7].set_domain(rack, 1234)
    assert look(gpu_inventory.CHECK).facts[gpu_inventory.DOMAIN] == f"{rack}.1234"


def test_a_lost_gpu_fails_both_checks_and_is_named(look: Callable[[Check], Result], gpus: SimulatedGpus):
    """The other seven are still looked at."""
    gpus[3].lost = True
    for check in (gpu_inventory.CHECK, gpu_health.CHECK):
        result = look(check)
        assert result.verdict is Verdict.FAIL
        assert "GPU 3 does not answer" in " ".join(result.sentences)
        assert any(value.subject == "GPU 4" for value in result.values)


def test_faults_that_the_driver_knows_of_are_told(look: Callable[[Check], Result], gpus: SimulatedGpus):
    """ECC errors, a row that could not be remapped, a pending remap, and a reset that the driver asks for."""
    gpus[0].set_ecc(uncorrected=2)
    gpus[1].set_remapped_rows(failure=True)
    gpus[2].set_remapped_rows(pending=True)
    gpus[4].set_recovery_action(1)
    result = look(gpu_health.CHECK)
    text = "\n".join(result.sentences)
    for expected in (
        "GPU 0: uncorrected ECC errors since the driver was loaded is 2",
        "GPU 1: a memory row could not be remapped",
        "GPU 2: a row remapping waits for a reset",
        "GPU 4: the driver asks for a GPU reset",
    ):
        assert expected in text
    assert result.failed


def test_links_that_are_narrow_or_down_fail_the_inventory(look: Callable[[Check], Result], gpus: SimulatedGpus):
    """Half the PCIe lanes and two dead NVLinks."""
    gpus[5].set_pcie(width=8)
    gpus[6].set_nvlink(2, active=False)
    gpus[6].set_nvlink(9, active=False)
    text = "\n".join(look(gpu_inventory.CHECK).sentences)
    assert "GPU 5: the PCIe link has 8 of 16 lanes" in text
    assert "GPU 6: 2 NVLinks are down (2, 9)" in text


def test_a_driver_that_fails_to_initialise_fails_the_node(look: Callable[[Check], Result], gpus: SimulatedGpus):
    """18: driver and library do not match. Not knowing is failing."""
    gpus.fail_init(18)
    result = look(gpu_health.CHECK)
    assert result.verdict is Verdict.FAIL
    assert "reload the driver" in result.reason
    assert result.failed


def test_a_time_series_has_clocks_temperature_and_errors_of_every_gpu(
    library: str, gpus: SimulatedGpus, tmp_path: Path
):
    """And of the processor, from a process of its own that ends with the burn-in."""
    gpus[3].lost = True
    gpus[4].set_ecc(uncorrected=2)
    file = tmp_path / "series.jsonl"
    with series.recording(file, library):
        assert eventually(lambda: bool(series.read(file)))
    [first] = series.read(file)
    assert {"clock", "temperature", "power", "corrected_errors"} <= first.values["GPU 0"].keys()
    assert first.values["GPU 3"]["lost"] == 1.0
    assert first.values["GPU 4"]["uncorrected_errors"] == 2.0
    assert "clock" in first.values["processor"]


def test_gpus_are_watched_while_they_work(library: str, gpus: SimulatedGpus):
    """The memory that a run takes, throttling, and a GPU that is gone: all by one test, as a process has one driver."""
    gpus[0].load(utilization=0, power_watts=100, memory_ratio=0.1)
    with MemoryUse(list, library) as memory_use:
        assert eventually(lambda: memory_use.share is not None)
        gpus[0].load(utilization=99, power_watts=700, memory_ratio=0.5)
        assert eventually(lambda: (memory_use.share or 0.0) > 0.45)
    assert memory_use.taken == pytest.approx(0.4 * 80e9, rel=0.15)
    with Watch(library) as watch:
        assert eventually(lambda: any(m.measure == "clock" for m in watch.measurements()))
        gpus[2].throttle_reasons = REASONS["hw_thermal"]
        gpus[3].lost = True
        assert eventually(lambda: {f.subject for f in watch.findings()} == {"GPU 2", "GPU 3"}, within_s=30)
    text = "\n".join(finding.summary for finding in watch.findings())
    assert "of the time by the hardware's thermal limit" in text
    assert "GPU 3 was lost under load" in text


def test_every_core_and_every_numa_node_is_measured(tmp_path: Path):
    """Throughput per core and bandwidth per NUMA node of this machine are positive and in base units."""
    context = Context("node-1", "quick", 0.0)
    processor, bandwidth = (one(check, context, tmp_path, 0.3) for check in (cpu.CHECK, memory.CHECK))
    rates = [value.value for value in processor.values if value.measure == "throughput"]
    assert len(rates) == int(processor.facts["cores"])
    assert min(rates) > 1e6
    assert all(value.value > 1e8 for value in bandwidth.values)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.slow
def test_storage_is_measured_with_fio_and_nothing_is_left(tmp_path: Path):
    """Bandwidth, operations and latency; a run that wants more than any disk has fails."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    context = Context(
        "node-1", "quick", 0.0, settings=PreflightSettings(local_dir=str(folder)), demand=Demand(tokens_per_s=1e18)
    )
    result = one(storage.LOCAL, context, tmp_path, 3.0)
    assert {value.measure for value in result.values} == {"write", "read", "random_read", "random_read_p99"}
    assert result.verdict is Verdict.FAIL
    assert "that the run consumes" in result.sentences[0]
    assert [*folder.iterdir()] == []


def test_a_storage_folder_that_does_not_exist_could_not_run(tmp_path: Path):
    """The sentence names the folder."""
    result = one(
        storage.LOCAL,
        Context("node-1", "quick", 0.0, settings=PreflightSettings(local_dir=str(tmp_path / "gone"))),
        tmp_path,
    )
    assert result.verdict is Verdict.COULD_NOT_RUN
    assert "gone" in result.reason or "fio is not installed" in result.reason
