"""Snapshots of the demo's run: rank pages, launcher events, the agent's incidents and metrics."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from opsd.control import ControlError, ask_launcher
from opsd.files import FileTail
from opsd.rank_page import PageError, RankPage, read_page

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
