"""The activity of ranks' GPUs, read when ranks seem to hang.

NVML is asked by a process of its own (``gpu_probe``): a driver call can hang, and the launcher waits for nothing that
the kernel may hold.

A running kernel is no sign of work. NCCL's kernels spin until the other ranks have come, and NVML then reports a GPU
that is busy all the time. What they poll stays in the caches: the memory controller is idle. So a GPU spins if one
kernel or another runs without a break and none uses the memory or the video engines, and works if it does anything
else: where kernels begin and end, something goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from opsd.launch.hangs.capture import ChildOutput
from opsd.launch.io.loop import Loop
from opsd.launch.ranks.process import GONE_S
from opsd.simulated.gpus import STATE_ENV

PROBE_S = 10.0
"""How long a verdict waits for the probe."""
WITHOUT_A_BREAK = 90
"""Percent of the time."""


class GpuState(StrEnum):
    """The activity of a GPU for the processes of a rank."""

    IDLE = "idle"
    SPINS = "spins"
    WORKS = "works"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The activity of a rank's GPUs, of the busiest one; percent of the time as in ``Sample``."""

    gpus: tuple[int, ...]
    state: GpuState
    kernels: int
    work: int

    def __str__(self) -> str:
        which = f"GPU {', '.join(map(str, self.gpus))}"
        match self.state:
            case GpuState.IDLE:
                return f"{which} runs no kernel"
            case GpuState.SPINS:
                return f"a kernel on {which} touches no memory, as one that waits for other ranks"
        return f"{which} works (kernels {self.kernels} % of the time, memory {self.work} %)"


class Sample(NamedTuple):
    """Percent of the time in which kernels ran, and in which the memory or the video engines were in use."""

    kernels: int
    work: int


def state_of(samples: Sequence[Sample]) -> GpuState:
    """The state of a GPU during some samples, at least one."""
    kernels = [sample.kernels for sample in samples]
    if max(sample.work for sample in samples) > 0:
        return GpuState.WORKS
    if max(kernels) == 0:
        return GpuState.IDLE
    return GpuState.SPINS if min(kernels) >= WITHOUT_A_BREAK else GpuState.WORKS


@dataclass(slots=True)
class GpuProbe:
    """Asks for the GPUs of the processes ``pids`` (by rank) once; ``uses`` holds what is known of each rank's."""

    command: Sequence[str] | None
    pids: Mapping[int, int]
    loop: Loop
    uses: dict[int, GpuUse] = field(default_factory=dict)
    _child: ChildOutput | None = None
    _begun: float = 0.0

    def start(self) -> None:
        """Begin; nothing is known without a driver, and of ranks whose GPU is shared or hidden."""
        self._begun = time.monotonic()
        if self.command is not None:
            with contextlib.suppress(OSError):
                self._child = ChildOutput((*self.command, *map(str, self.pids.values())), self.loop, self._ended)

    @property
    def awaited(self) -> bool:
        """Whether the answer is still worth waiting for."""
        return self._child is not None and time.monotonic() - self._begun < PROBE_S

    @property
    def running(self) -> frozenset[int]:
        """The probe's process."""
        return frozenset() if self._child is None else frozenset({self._child.pid})

    def close(self) -> None:
        """Kill the probe."""
        if self._child is not None:
            self._child.close(GONE_S)
            self._child = None

    def _ended(self, text: str) -> None:
        self._child = None
        found = parse_uses(text)
        self.uses.update({rank: found[pid] for rank, pid in self.pids.items() if pid in found})


def parse_uses(text: str) -> dict[int, GpuUse]:
    """The output of the probe by pid; empty if it was cut short."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return {
            int(entry["pid"]): GpuUse(
                tuple(entry["gpus"]), GpuState(entry["state"]), int(entry["kernels"]), int(entry["work"])
            )
            for entry in json.loads(text)
        }
    return {}


def find_gpu_probe() -> tuple[str, ...] | None:
    """The command of the probe, None on a node without NVIDIA GPUs."""
    if not Path("/dev/nvidiactl").exists() and STATE_ENV not in os.environ:
        return None
    return sys.executable, "-P", "-m", "opsd.launch.hangs.gpu_probe"
