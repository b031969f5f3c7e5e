"""What a scrape of the real agent holds on a node with GPUs, RDMA ports and a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from opsd.client import Reporter, process_start
from opsd.commands.metrics import catalogue
from opsd.simulated.gpus import SimulatedGpus
from opsd.stack.node import Port
from tests.fakes.clock import eventually
from tests.fakes.process import Opsd

pytestmark = pytest.mark.xdist_group("agent-process")

GPUS = 2
ELSEWHERE = {
    "opsd_gpu_retired_pages", "opsd_gpu_retired_pages_pending", "opsd_gpu_fabric_problem",
    "opsd_gpu_fabric_info",
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE", "DCGM_FI_PROF_PIPE_FP32_ACTIVE", "DCGM_FI_PROF_PIPE_FP16_ACTIVE",
    "opsd_run_seconds_total", "opsd_run_planned_seconds", "opsd_run_forecast_seconds", "opsd_run_beyond_plan_seconds",
}  # fmt: skip
"""What the simulated H100 does not tell, and what is off by default."""

OF_THE_KERNEL = (
    "opsd_host_pressure", "opsd_host_numa", "opsd_host_clock_offset", "opsd_host_clock_max_error", "opsd_host_gpu_",
)  # fmt: skip
"""Not told by every kernel, or not while no service keeps the clock right, or only on machines with a real GPU."""

OF_INCIDENTS = ("opsd_incident_brief_info", "opsd_incident_gpu_seconds")
"""Not told while there is no incident."""

OF_SOME_RUNS = ("opsd_evaluation_", "opsd_rank_router_")
"""Gauges of runs that evaluate their checkpoints, or have a mixture of experts; this one does neither."""


def start_run(folder: Path) -> list[Reporter]:
    """A run of this process with two ranks that have trained a step and saved a checkpoint."""
    folder.mkdir(parents=True)
    run = {
        "job": "4242", "node": "n", "state": "running", "generation": 1, "launcher_pid": os.getpid(),
        "launcher_start": process_start(os.getpid()), "world_size": GPUS, "control": "", "folder": str(folder),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    mixture = {"t": 0.0, "event": "data_mixture", "rank": 0, "step": 0, "tokens": {"web": 8192}, "epochs": {"web": 0.1}}
    (folder / "events.jsonl").write_text(json.dumps(mixture) + "\n")
    pages = [folder / f"rank-{rank:04d}.page" for rank in range(GPUS)]
    reporters = [Reporter(page, rank=rank, gpu=rank, job="4242", run="train") for rank, page in enumerate(pages)]
    for reporter in reporters:
        reporter.model(flops_per_token=18e9, peak_flops=989e12)
        reporter.step(tokens=4096, loss=2.0, grad_norm=1.0, learning_rate=1e-3)
        reporter.checkpoint_committed(0)
    return reporters


@pytest.fixture(scope="module")
def scrape(tmp_path_factory: pytest.TempPathFactory, library: str) -> Iterator[str]:
    """One scrape, in Prometheus' own format, of an agent that has looked several times."""
    folder = tmp_path_factory.mktemp("node")
    Port(folder / "infiniband/mlx5_0")
    reporters = start_run(folder / "shm" / "train")
    with SimulatedGpus.create(folder / "gpus.state", count=GPUS) as gpus:
        gpus[0].set_processes([(os.getpid(), 1 << 30)])
        gpus[1].partition(["1g.10gb"])
        opsd = Opsd(folder, library, gpus)
        options = [
            f"--set=infiniband.root={folder / 'infiniband'}",
            '--set=infiniband.expect=["mlx5_0"]',
            "--set=agent.interval_s=0.2",
        ]
        with opsd.agent(*options):
            assert eventually(lambda: "\nopsd_agent_ticks_total 5" in (opsd.get("/metrics") or ""))
            yield opsd.get("/metrics") or ""
    assert reporters


def test_every_series_is_in_the_catalogue(scrape: str) -> None:
    """With the labels that `opsd metrics --list` names, and there is nothing else."""
    known = {metric.name: set(metric.labels) for _, metric in catalogue()}
    seen = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(scrape)
        for sample in family.samples
    }
    assert {name: labels for name, labels in seen.items() if known.get(name) != labels} == {}


@pytest.mark.parametrize("source", ["agent", "nvml", "host", "infiniband", "ranks"])
def test_every_metric_is_there_from_the_start(scrape: str, source: str) -> None:
    """Counters too, at 0: one that appears with its first event makes increase() blind for that event."""
    seen = {sample.name for family in text_string_to_metric_families(scrape) for sample in family.samples}
    orphans = {"opsd_gpu_orphan_processes", "opsd_gpu_orphan_memory_bytes"}
    missing = {metric.name for name, metric in catalogue() if source in name.split(", ")} - seen
    assert {
        name
        for name in missing - ELSEWHERE - orphans
        if not name.startswith((*OF_THE_KERNEL, *OF_INCIDENTS, *OF_SOME_RUNS))
    } == set()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
def test_promtool_finds_nothing_wrong(scrape: str) -> None:
    """But for dcgm-exporter's label names and one of its metrics' names, which are what they are."""
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape, capture_output=True, text=True, check=False
    )
    said = (checked.stdout + checked.stderr).splitlines()
    theirs = (
        "label names should be written in 'snake_case' not 'camelCase'",
        "metric name should not include type 'counter'",
    )
    assert [line for line in said if not (line.startswith("DCGM_FI_") and line.endswith(theirs))] == []
