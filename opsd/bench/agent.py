"""CPU, memory, series and scrape time of the agent, beside nvitop-exporter on the same simulated driver.

The simulated node is typical: eight H100 with 18 NVLinks each, eight InfiniBand ports, eight ranks in training.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from opsd.bench import memory_folder
from opsd.client import Reporter, process_start
from opsd.ports import free_port
from opsd.simulated.gpus import STATE_ENV, SimulatedGpus, build
from opsd.stack.world import Port

GPUS = PORTS = RANKS = 8
STEP_S = 0.25
WARM_UP_S, MEASURED_S = 3, 30
SCRAPES = 100
"""Number of scrapes for the percentiles, done after the CPU time was measured."""
START_TIMEOUT_S = 20.0
COMPLETE = 0.99
"""Share of its series with which an exporter is ready: a few, like a disk's latency, appear only after activity."""


def run() -> dict[str, float | int | str]:
    """Both exporters, scraped once a second over the same 30 s. CPU in percent of one core.

    The agent has every collector and runbook enabled. ``ours_ready_s`` is the time from the start of its process to the
    first scrape with all series except those of idle disks. Scrape times are measured by a client in this process.
    """
    with node() as place, ExitStack() as stack:
        exporters = [stack.enter_context(ours(place)), *stack.enter_context(nvitop(place))]
        return _measure(exporters)


@dataclass(frozen=True, slots=True)
class BenchNode:
    """The simulated node: ``folder`` has its ports and its run, ``library`` its driver, ``state`` its GPUs."""

    folder: Path
    library: Path
    state: Path


@contextlib.contextmanager
def node() -> Iterator[BenchNode]:
    """A node with a training run, until the end of the block."""
    with ExitStack() as stack:
        folder = stack.enter_context(memory_folder())
        library = build(folder)
        gpus = stack.enter_context(SimulatedGpus.create(folder / "gpus.state", count=GPUS))
        for gpu in gpus:
            gpu.load(utilization=97, power_watts=650, memory_ratio=0.8)
            gpu.nvlink_bytes_per_second, gpu.pcie_bytes_per_second = 200e9, 20e9
            gpu.set_processes([(os.getpid(), 60 << 30)])
        ports = [Port(folder / "infiniband" / f"mlx5_{index}") for index in range(PORTS)]
        stack.enter_context(_training(folder / "shm" / "bench", ports))
        yield BenchNode(folder, library, gpus.path)


class Exporter:
    """A running exporter: its process, its port, how long it took until all its series existed."""

    def __init__(self, name: str, command: Sequence[str], port: int, environment: dict[str, str]) -> None:
        self.name, self.port = name, port
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._usage = psutil.Process(self._process.pid)
        self._seen: list[tuple[float, int]] = []

    def wait(self) -> None:
        """Scrape until the number of series has not changed for three seconds."""
        while not self._seen or time.monotonic() - self._seen[-1][0] < 3.0:
            with contextlib.suppress(OSError):
                series = self.scrape()[1]
                if not self._seen or series > self._seen[-1][1]:
                    self._seen.append((time.monotonic(), series))
            if not self._seen and time.monotonic() - self._started > START_TIMEOUT_S:
                raise RuntimeError(f"{self.name} has not answered for {START_TIMEOUT_S:g} s")
            time.sleep(0.02)

    @property
    def ready_s(self) -> float:
        """Seconds from the start to the first scrape with ``COMPLETE`` of all series."""
        enough = COMPLETE * self._seen[-1][1]
        return next(at for at, series in self._seen if series >= enough) - self._started

    def scrape(self) -> tuple[float, int]:
        """Seconds that one scrape took, and the number of series in it."""
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        connection.request("GET", "/metrics")
        body = connection.getresponse().read()
        connection.close()
        return time.perf_counter() - began, sum(not line.startswith(b"#") for line in body.splitlines())

    def cpu_s(self) -> float:
        """CPU seconds used so far."""
        times = self._usage.cpu_times()
        return times.user + times.system

    def rss_mib(self) -> float:
        """Resident memory."""
        return self._usage.memory_info().rss / 2**20

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def ours(place: BenchNode) -> Iterator[Exporter]:
    """The agent on that node, once it has all its series."""
    folder, port = place.folder, free_port()
    settings = {
        "agent.listen": f"127.0.0.1:{port}",
        "agent.state_dir": folder / "state",
        "nvml.library": place.library,
        "ranks.root": folder / "shm",
        "infiniband.root": folder / "infiniband",
        "policy.mode": "act",
    }
    options = [f"--set={key}={value}" for key, value in settings.items()]
    empty = folder / "opsd.toml"
    empty.touch()
    command = [sys.executable, "-m", "opsd", "agent", f"--config={empty}", *options]
    with _running(Exporter("ours", command, port, {STATE_ENV: str(place.state)})) as exporter:
        yield exporter


@contextlib.contextmanager
def nvitop(place: BenchNode) -> Iterator[list[Exporter]]:
    """nvitop-exporter on that node, once it has all its series; none where it is not installed."""
    program, port = shutil.which("nvitop-exporter", path=str(Path(sys.executable).parent)), free_port()
    if program is None:
        yield []
        return
    environment = {STATE_ENV: str(place.state), "LD_LIBRARY_PATH": str(place.library.parent)}
    with _running(Exporter("nvitop", [program, f"--port={port}", "--interval=1"], port, environment)) as exporter:
        yield [exporter]


@contextlib.contextmanager
def _running(exporter: Exporter) -> Iterator[Exporter]:
    try:
        exporter.wait()
        yield exporter
    finally:
        exporter.stop()


@contextlib.contextmanager
def _training(folder: Path, ports: Sequence[Port]) -> Iterator[None]:
    """A run with eight ranks, all in this process, that complete four steps a second."""
    folder.mkdir(parents=True)
    run = {
        "run": "bench", "job": "1", "node": "bench", "state": "running", "generation": 1, "launcher_pid": os.getpid(),
        "launcher_start": process_start(os.getpid()), "world_size": RANKS, "control": "", "folder": str(folder),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    reporters = [
        Reporter(folder / f"rank-{rank:04d}.page", rank=rank, world_size=RANKS, gpu=rank, run="bench")
        for rank in range(RANKS)
    ]
    for reporter in reporters:
        reporter.add_worker(os.getpid(), "data")
    stop = threading.Event()

    def train() -> None:
        while not stop.wait(STEP_S):
            for port in ports:
                port.carry(int(40e9 * STEP_S))
            for reporter in reporters:
                for phase in ("data", "forward", "backward", "collective", "optimizer"):
                    with reporter.phase(phase):
                        pass
                reporter.step(tokens=4096, loss=2.0, grad_norm=1.0)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _measure(exporters: Sequence[Exporter]) -> dict[str, float | int | str]:
    _scrape_each_second(exporters, WARM_UP_S)
    before, began = [exporter.cpu_s() for exporter in exporters], time.monotonic()
    _scrape_each_second(exporters, MEASURED_S)
    elapsed = time.monotonic() - began
    results: dict[str, float | int | str] = {}
    for exporter, used in zip(exporters, before, strict=True):
        name = exporter.name
        results[f"{name}_cpu_percent"] = 100 * (exporter.cpu_s() - used) / elapsed
        results[f"{name}_rss_mib"] = exporter.rss_mib()
        results[f"{name}_series"] = exporter.scrape()[1]
        results[f"{name}_ready_s"] = exporter.ready_s
        cuts = statistics.quantiles([exporter.scrape()[0] * 1e3 for _ in range(SCRAPES)], n=100)
        results[f"{name}_scrape_p50_ms"], results[f"{name}_scrape_p99_ms"] = cuts[49], cuts[98]
    if "nvitop_cpu_percent" in results:
        for measure in ("cpu", "series"):
            suffix = "_percent" if measure == "cpu" else ""
            ours, theirs = results[f"ours_{measure}{suffix}"], results[f"nvitop_{measure}{suffix}"]
            results[f"ratio_{measure}"] = float(ours) / float(theirs)
    return results


def _scrape_each_second(exporters: Sequence[Exporter], seconds: int) -> None:
    origin = time.monotonic()
    for second in range(1, seconds + 1):
        for exporter in exporters:
            exporter.scrape()
        time.sleep(max(0.0, origin + second - time.monotonic()))
