"""The demo's GPUs: the machine's own if it has any, eight simulated ones otherwise."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from opsd.demo.scene import SIMULATED_GPUS, Scene
from opsd.demo.world import Snapshot
from opsd.simulated.gpus import NoCompilerError, SimulatedGpus, SimulationError, build

LOAD_WATTS, IDLE_WATTS = 640.0, 95.0


@dataclass(frozen=True, slots=True)
class Gpus:
    """``simulated`` is None on a machine with real GPUs, and if they cannot be simulated; ``why`` is the reason."""

    simulated: SimulatedGpus | None
    why: str = ""

    def follow(self, now: Snapshot) -> None:
        """Put load on the simulated GPUs of live ranks; the others are idle."""
        if self.simulated is None:
            return
        busy = {page.local_rank for page in now.pages if page.state == "running" and page.steps_reported}
        for gpu in self.simulated:
            works = gpu.index in busy
            gpu.load(utilization=98 if works else 0, power_watts=LOAD_WATTS if works else IDLE_WATTS)


def prepare(scene: Scene, path: str | None = None) -> Gpus:
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
