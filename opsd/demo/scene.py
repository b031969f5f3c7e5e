"""The scene of the demo: its cluster, run and agent.

Snapshots of the demo's run: rank pages, launcher events, the agent's incidents and metrics.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from opsd.control import ControlError, ask_launcher
from opsd.dependents import Dependents
from opsd.files import FileTail
from opsd.ports import free_port
from opsd.rank_page import PageError, RankPage, read_page
from opsd.simulated.gpus import NoCompilerError, SimulatedGpus, SimulationError, build

GPU_METRICS = {
    "DCGM_FI_DEV_GPU_TEMP": "temperature",
    "DCGM_FI_DEV_SM_CLOCK": "clock_mhz",
    "DCGM_FI_DEV_POWER_USAGE": "power_watts",
    "opsd_gpu_power_limit_watts": "limit_watts",
    "DCGM_FI_DEV_GPU_UTIL": "utilization",
}


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The run at one moment. ``wall`` is epoch seconds; ``incidents`` and ``gpus`` are None without the agent.

    ``standby`` is the number of warm interpreters that the launcher has ready.
    """

    wall: float
    pages: tuple[RankPage, ...]
    events: Sequence[Mapping[str, Any]]
    incidents: Sequence[Mapping[str, Any]] | None
    gpus: Mapping[int, Mapping[str, float]] | None
    standby: int = 0

    @property
    def step(self) -> int:
        """The newest step that every rank has completed; -1 before the first."""
        if not self.pages:
            return -1
        return min(page.last_step.step if page.last_step else -1 for page in self.pages)

    @property
    def generation(self) -> int:
        """The newest generation seen."""
        return max((page.generation for page in self.pages), default=0)


@dataclass
class RunObserver:
    """Takes snapshots. ``folder`` is the run's shared-memory folder, ``events`` the launcher's event file."""

    folder: Path
    events: Path
    agent_url: str
    _seen: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tail = FileTail(self.events)

    def look(self, wall: float) -> RunSnapshot:
        """A snapshot of now; parts that cannot be read are absent."""
        while records := list(self._tail.records()):
            self._seen.extend(records)
        incidents = self._get("/api/v1/incidents?symptoms=1")
        return RunSnapshot(
            wall=wall,
            pages=tuple(_pages(self.folder)),
            events=self._seen,
            incidents=None if incidents is None else _with_symptoms(json.loads(incidents)["incidents"]),
            gpus=parse_gpus(self._get("/metrics")),
            standby=self._standby(),
        )

    def _standby(self) -> int:
        try:
            return int(ask_launcher(self.folder / "control.sock", {"cmd": "status"}, timeout_s=1.0)["standby"])
        except (ControlError, KeyError):
            return 0

    def _get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(self.agent_url + path, timeout=2) as answer:  # noqa: S310 (our own agent)
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return None


def _with_symptoms(incidents: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each incident followed by its symptoms, as a fault of the demo may be detected as a symptom of another."""
    return [found for incident in incidents for found in (incident, *incident["symptoms"])]


def _pages(folder: Path) -> list[RankPage]:
    pages = []
    for path in sorted(folder.glob("rank-*.page")):
        try:
            pages.append(read_page(path))
        except PageError:
            continue
    return pages


def waited_s() -> float:
    """Seconds in which at least one task of this machine waited for a processor; 0 if the kernel does not tell."""
    try:
        some = Path("/proc/pressure/cpu").read_text(encoding="ascii").splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return 0.0


def parse_gpus(text: str | None) -> Mapping[int, Mapping[str, float]] | None:
    """GPU index -> its values on the screen, from the agent's metrics; None without metrics."""
    if text is None:
        return None
    gpus: dict[int, dict[str, float]] = {}
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(tuple(GPU_METRICS)))
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            if (name := GPU_METRICS.get(sample.name)) and "gpu" in sample.labels:
                gpus.setdefault(int(sample.labels["gpu"]), {})[name] = sample.value
    return gpus


# The demo's environment: workspace, simulated GPUs, agent, and the programs that it starts and stops.


SIMULATED_GPUS = 8
RANKS = 2
SHM_ROOT = Path("/dev/shm")  # noqa: S108 (shared memory, in a folder of our own)
SHM_BYTES = 48 << 20
"""What the demo needs of shared memory at most: its checkpoints in memory, rank pages and torch's queues."""
TEXT_BYTES = 3_000_000
AGENT_S = 60.0


class DemoError(Exception):
    """The demo cannot continue; the message says why."""


class Scene:
    """Starts and stops the programs of the demo. They end with it, however it ends.

    ``folder`` holds everything that the demo writes, except rank pages and simulated GPUs. These are in ``shm``, a
    folder in shared memory that is removed at the end, below which each part of the demo has one of its own.
    """

    def __init__(self, folder: Path, shm: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.library: Path | None = None
        self._dependents = Dependents()
        self._shm = self._dependents.folder(shm)
        self._agent: subprocess.Popen[bytes] | None = None
        self._part = ""

    @property
    def shm(self) -> Path:
        """The shared memory of this part of the demo."""
        return self._shm / self._part

    @property
    def gpu_state(self) -> Path | None:
        """The simulated GPUs of this part of the demo."""
        return self.shm / "gpus" if self.library else None

    @property
    def agent_url(self) -> str:
        """Where the agent listens."""
        return f"http://127.0.0.1:{self.port}"

    def begin(self, part: str) -> None:
        """From now on agent, GPUs and ranks are those of another node."""
        self._part = part
        self.shm.mkdir(mode=0o700)

    def start(self, arguments: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        """Start ``python -m …`` with its output in ``log`` (a name inside the folder)."""
        with open(self.folder / log, "wb") as output:
            return self._dependents.start([sys.executable, "-m", *arguments], output, self.environment())

    def call(self, arguments: Sequence[str], log: str) -> None:
        """Run ``python -m …`` to its end. Raises DemoError with the end of its output if it fails."""
        process = self.start(arguments, log)
        if process.wait() != 0:
            raise DemoError(f"{' '.join(arguments)} failed ({process.returncode}):\n{self.tail(log)}")

    def start_agent(self) -> subprocess.Popen[bytes]:
        """Start the agent of this part in policy mode act, in place of the one before. Raises DemoError."""
        if self._agent is not None:
            self._agent.terminate()
            self._agent.wait(AGENT_S)
        config = self.folder / f"{self._part}.toml"
        library = f'library = "{self.library}"\n' if self.library else ""
        config.write_text(
            f'[agent]\nlisten = "127.0.0.1:{self.port}"\nstate_dir = "{self._state}"\n\n'
            f'[ranks]\nroot = "{self.shm}"\n\n[nvml]\n{library}\n[policy]\nmode = "act"\ncooldown_s = 2.0\n',
            encoding="utf-8",
        )
        self._agent = self.start(["opsd", "agent", "--config", str(config)], f"agent-{self._part}.log")
        if not _answers(f"{self.agent_url}/readyz", self._agent):
            raise DemoError(f"the agent does not answer:\n{self.tail(f'agent-{self._part}.log')}")
        return self._agent

    def start_run(self, name: str, program: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start ``opsd launch`` with two ranks of ``program``; its run folder is ``folder / name``."""
        launch = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=20"]
        where = [f"--run-id={name}", f"--run-dir={self.folder / name}"]
        return self.start(["opsd", "launch", *launch, *where, *program], f"{name}.log")

    def environment(self) -> dict[str, str]:
        """The environment of everything started here."""
        extra = {"OPSD_SHM": str(self.shm), "OPSD_STATE_DIR": str(self._state), "PYTHONUNBUFFERED": "1"}
        if self.gpu_state is not None:
            extra["OPSD_SIMULATED_NVML"] = str(self.gpu_state)
            extra["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(SIMULATED_GPUS)))
        return {**os.environ, **extra}

    def tail(self, log: str, lines: int = 15) -> str:
        """The last lines of a log."""
        return "\n".join((self.folder / log).read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Stop everything that is still running and remove the shared memory."""
        self._dependents.close()

    @property
    def _state(self) -> Path:
        return self.folder / f"agent-{self._part}"


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + AGENT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2):  # noqa: S310 (our own agent)
                return True
        except OSError:
            time.sleep(0.1)
    return False


def open_scene(folder: Path, shm_root: Path = SHM_ROOT) -> Scene:
    """Create the workspace. Raises DemoError if the folders cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"the demo cannot write to {error.filename}: {error.strerror}; choose another --dir") from error
    shm = shm_root / f"opsd-demo-{os.getpid()}"
    try:
        shm.mkdir(mode=0o700)
        room = shutil.disk_usage(shm).free
    except OSError as error:
        raise DemoError(
            f"the demo needs shared memory, and cannot write to {shm_root}: {error.strerror}; in a container mount a "
            "tmpfs there (docker run --shm-size=1g)"
        ) from error
    if room < SHM_BYTES:
        shm.rmdir()
        raise DemoError(
            f"the demo needs {SHM_BYTES >> 20} MiB of shared memory, and {shm_root} has {room >> 20} MiB free; in a "
            "container mount a larger tmpfs there (docker run --shm-size=1g)"
        )
    return Scene(folder, shm)


LOAD_WATTS, IDLE_WATTS = 640.0, 95.0
RANK_BYTES = 60 << 30


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one part of the demo; ``simulated`` is None if they are real, or cannot be simulated."""

    simulated: SimulatedGpus | None

    @classmethod
    def create(cls, scene: Scene) -> Gpus:
        """New ones."""
        return cls(SimulatedGpus.create(scene.gpu_state, count=SIMULATED_GPUS) if scene.gpu_state else None)

    def follow(self, now: RunSnapshot) -> None:
        """Put the processes and the load of live ranks on the simulated GPUs; the others are idle."""
        if self.simulated is None:
            return
        busy = {page.local_rank: page.pid for page in now.pages if page.state == "running" and page.steps_reported}
        for gpu in self.simulated:
            works = gpu.index in busy
            gpu.set_processes([(busy[gpu.index], RANK_BYTES)] if works else [])
            gpu.load(utilization=98 if works else 0, power_watts=LOAD_WATTS if works else IDLE_WATTS)


def prepare_gpus(scene: Scene, path: str | None = None) -> str:
    """Have ``scene`` simulate GPUs; returns why that cannot be, "" if it can.

    ``path`` is searched for a compiler, by default PATH.
    """
    if _has_real_gpus():
        return "this machine has real GPUs, and the demo does not overheat these"
    try:
        scene.library = build(scene.folder / "simulated", path)
    except (NoCompilerError, SimulationError) as error:
        return str(error)
    return ""


def _has_real_gpus() -> bool:
    """True if the NVIDIA driver's library loads and counts at least one GPU."""
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    count = ctypes.c_uint()
    return driver.nvmlInit_v2() == 0 and driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value > 0


MIN_BYTES, MAX_BYTES = 2_000, 200_000


def copy_text(target: Path, limit: int) -> int:
    """Copy text files into ``target`` until ``limit`` bytes are reached; returns the bytes copied.

    The order is fixed, so that one machine always gives the same text. Raises OSError if ``target`` cannot
    be written.
    """
    target.mkdir(parents=True, exist_ok=True)
    total = 0
    for number, source in enumerate(_sources()):
        if total >= limit:
            break
        data = source.read_bytes()
        (target / f"{number:05d}-{source.name}.txt").write_bytes(data)
        total += len(data)
    return total


def _sources() -> Iterator[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    for folder, pattern in ((library, "*.py"), (Path("/usr/share/doc"), "README*"), (Path("/usr/share/doc"), "*.txt")):
        for path in sorted(folder.rglob(pattern)):
            if "site-packages" in path.parts or "test" in path.parts or path.is_symlink():
                continue
            if path.is_file() and MIN_BYTES <= path.stat().st_size <= MAX_BYTES and _is_text(path):
                yield path


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True
