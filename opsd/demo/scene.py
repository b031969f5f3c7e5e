"""The demo's environment: workspace, simulated GPUs, agent, and the programs that it starts and stops."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opsd.demo.world import RunSnapshot
from opsd.ports import free_port
from opsd.simulated.gpus import NoCompilerError, SimulatedGpus, SimulationError, build

SIMULATED_GPUS = 8
RANKS = 2
SHM_ROOT = Path("/dev/shm")  # noqa: S108 (shared memory, in a folder of our own)
TEXT_BYTES = 3_000_000


class DemoError(Exception):
    """The demo cannot continue; the message says why."""


@dataclass
class Scene:
    """``folder`` holds everything that the demo writes, except rank pages, which are in shared memory."""

    folder: Path
    shm: Path
    port: int
    library: Path | None = None
    gpu_state: Path | None = None
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def agent_url(self) -> str:
        """Where the demo's agent listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, arguments: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        """Start ``python -m …`` with its output in ``log`` (a name inside the folder)."""
        with open(self.folder / log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments], env=self.environment(), stdout=output, stderr=subprocess.STDOUT
            )
        self._processes.append(process)
        return process

    def call(self, arguments: Sequence[str], log: str) -> None:
        """Run ``python -m …`` to its end. Raises DemoError with the end of its output if it fails."""
        process = self.start(arguments, log)
        if process.wait() != 0:
            raise DemoError(f"{' '.join(arguments)} failed ({process.returncode}):\n{self.tail(log)}")

    def start_agent(self) -> subprocess.Popen[bytes]:
        """Start the agent in policy mode act."""
        config = self.folder / "opsd.toml"
        library = f'library = "{self.library}"\n' if self.library else ""
        config.write_text(
            f'[agent]\nlisten = "127.0.0.1:{self.port}"\nstate_dir = "{self.folder / "agent"}"\n\n'
            f'[ranks]\nroot = "{self.shm}"\n\n[nvml]\n{library}\n[policy]\nmode = "act"\ncooldown_s = 2.0\n',
            encoding="utf-8",
        )
        return self.start(["opsd", "agent", "--config", str(config)], "agent.log")

    def start_run(self, name: str, program: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start ``opsd launch`` with two ranks of ``program``; its run folder is ``folder / name``."""
        launch = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=20"]
        where = [f"--run-id={name}", f"--run-dir={self.folder / name}"]
        return self.start(["opsd", "launch", *launch, *where, *program], f"{name}.log")

    def environment(self) -> dict[str, str]:
        """The environment of everything started here."""
        extra = {"OPSD_SHM": str(self.shm), "OPSD_STATE_DIR": str(self.folder / "agent"), "PYTHONUNBUFFERED": "1"}
        if self.gpu_state is not None:
            extra["OPSD_SIMULATED_NVML"] = str(self.gpu_state)
            extra["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(SIMULATED_GPUS)))
        return {**os.environ, **extra}

    def tail(self, log: str, lines: int = 15) -> str:
        """The last lines of a log."""
        return "\n".join((self.folder / log).read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Stop everything that is still running and remove the shared memory."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.shm, ignore_errors=True)


def open_scene(folder: Path) -> Scene:
    """Create the workspace. Raises DemoError if the folder cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shm = SHM_ROOT / f"opsd-demo-{os.getpid()}"
        shm.mkdir(mode=0o700)
    except OSError as error:
        raise DemoError(f"the demo cannot write to {error.filename}: {error.strerror}; choose another --dir") from error
    return Scene(folder, shm, free_port())


LOAD_WATTS, IDLE_WATTS = 640.0, 95.0
RANK_BYTES = 60 << 30


@dataclass(frozen=True, slots=True)
class Gpus:
    """``simulated`` is None on a machine with real GPUs, and if they cannot be simulated; ``why`` is the reason."""

    simulated: SimulatedGpus | None
    why: str = ""

    def follow(self, now: RunSnapshot) -> None:
        """Put the processes and the load of live ranks on the simulated GPUs; the others are idle."""
        if self.simulated is None:
            return
        busy = {page.local_rank: page.pid for page in now.pages if page.state == "running" and page.steps_reported}
        for gpu in self.simulated:
            works = gpu.index in busy
            gpu.set_processes([(busy[gpu.index], RANK_BYTES)] if works else [])
            gpu.load(utilization=98 if works else 0, power_watts=LOAD_WATTS if works else IDLE_WATTS)


def prepare_gpus(scene: Scene, path: str | None = None) -> Gpus:
    """Find or simulate GPUs and configure ``scene`` for them. ``path`` is searched for a compiler, by default PATH."""
    if _has_real_gpus():
        return Gpus(None, "this machine has real GPUs, and the demo does not overheat these")
    try:
        scene.library = build(scene.folder / "simulated", path)
    except (NoCompilerError, SimulationError) as error:
        return Gpus(None, str(error))
    scene.gpu_state = scene.shm / "gpus"
    return Gpus(SimulatedGpus.create(scene.gpu_state, count=SIMULATED_GPUS))


def _has_real_gpus() -> bool:
    """True if the NVIDIA driver's library loads and counts at least one GPU."""
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    count = ctypes.c_uint()
    return driver.nvmlInit_v2() == 0 and driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value > 0
