"""Jobs and repairs of this node: whose its GPUs are, which are idle, and where its repair is. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from opsd.agent.loop import Snapshot
from opsd.words import span

IDLE_S: Final = 60.0
"""A GPU that ran no kernel for this long counts as idle."""

_ON_GPU, _IDLE, _JOB = "opsd_gpu_job_info", "opsd_gpu_job_idle_seconds", "opsd_slurm_job_info"


@dataclass(frozen=True, slots=True)
class JobOnGpus:
    """A job with GPUs of this node by index. ``idle_s`` has the seconds of those that are idle; "" is unknown."""

    job: str
    user: str
    partition: str
    gpus: tuple[int, ...]
    idle_s: Mapping[int, float]

    @property
    def idle_gpu_hours(self) -> float:
        """The cost of its idle GPUs since each last worked."""
        return sum(self.idle_s.values()) / 3600


def jobs_on_gpus(snapshot: Snapshot) -> list[JobOnGpus]:
    """Every job that has a GPU of this node, by its id."""
    gpus: dict[str, set[int]] = {}
    idle: dict[str, dict[int, float]] = {}
    owners: dict[str, tuple[str, str]] = {}
    for metric, value, labels in snapshot.select(_ON_GPU, _IDLE, _JOB):
        if metric.name == _ON_GPU and labels[1]:
            gpus.setdefault(labels[1], set()).add(int(labels[0]))
        elif metric.name == _IDLE and value >= IDLE_S:
            idle.setdefault(labels[1], {})[int(labels[0])] = round(value, 1)
        elif metric.name == _JOB:
            owners[labels[0]] = labels[1], labels[2]
    return [
        JobOnGpus(job, *owners.get(job, ("", "")), tuple(sorted(gpus[job])), dict(sorted(idle.get(job, {}).items())))
        for job in sorted(gpus, key=lambda job: (len(job), job))
    ]


def cost_text(gpu_hours: float, about: Mapping[str, Any]) -> str:
    """GPU-hours, with their price where ``about``, the facts of an agent, has that of one and its currency."""
    price, currency = float(about.get("gpu_hour", 0.0)), about.get("currency", "")
    return f"{gpu_hours:.1f} GPU-hours" + (f", {gpu_hours * price:,.2f} {currency}" if price else "")


@dataclass(frozen=True, slots=True)
class RepairNow:
    """A repair that is ordered or under way, or that has left this node out of service.

    ``state`` is a value of ``opsd_repair_state``; ``age_s`` is None once it has ended.
    """

    state: str
    attempts: int
    age_s: float | None

    @property
    def text(self) -> str:
        """In a few words: ``retest, remedy 2, for 12 min``."""
        remedy = f", remedy {self.attempts}" if self.attempts else ""
        return f"{self.state}{remedy}" + (f", for {span(self.age_s)}" if self.age_s is not None else "")


def repair_now(snapshot: Snapshot) -> RepairNow | None:
    """None if nothing is to be said of one: there was none, or the node is back in service."""
    state = next((sample.labels[0] for sample in snapshot.select("opsd_repair_state") if sample.value), None)
    age_s = snapshot.value("opsd_repair_age_seconds")
    in_service = any(s.labels == ("drain",) and s.value == 0 for s in snapshot.select("opsd_slurm_node_flag"))
    if state is None or state == "returned" or (age_s is None and in_service):
        return None
    return RepairNow(state, int(snapshot.value("opsd_repair_attempts") or 0), age_s)


def outcome(ok: bool | None) -> str:
    """How a step of a repair has ended, in a word."""
    return {True: "done", False: "failed", None: "under way"}[ok]
