"""The faults of the demo: how each is caused, the expected culprit, and when it counts as repaired."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opsd.checkpoints import manifest
from opsd.demo.scene import RunSnapshot
from opsd.rank_page import RankPage
from opsd.simulated.gpus import SimulatedGpu


@dataclass(frozen=True, slots=True)
class FaultTargets:
    """What faults change: the run's checkpoints, its shared memory and, if simulated, the GPUs."""

    checkpoints: Path
    shm: Path
    gpus: Mapping[int, SimulatedGpu] | None


@dataclass(frozen=True, slots=True)
class DemoFault:
    """``inject`` causes the fault and returns the expected culprit, as a subset of the incident's fields.

    ``broke`` and ``by_hand`` say in plain words what it was, and what a person would have had to do. ``restarts`` says
    that the ranks must be restarted, for which the demo first waits for warm interpreters. ``symptoms`` are the kinds
    of incidents that must become symptoms of this fault's. ``simulated`` faults need simulated GPUs.
    """

    kind: str
    title: str
    runbook: str
    inject: Callable[[FaultTargets, RunSnapshot], dict[str, object]]
    recovered: Callable[[Trial, RunSnapshot], float | None]
    broke: str = ""
    by_hand: str = ""
    ready: Callable[[Trial | None, RunSnapshot], bool] = lambda _previous, _now: True
    restarts: bool = True
    symptoms: tuple[str, ...] = ()
    simulated: bool = False


@dataclass
class Trial:
    """One fault and what the demo has observed about it; times are epoch seconds."""

    fault: DemoFault
    injected_at: float
    injected_step: int
    expected: dict[str, object]
    detected_at: float | None = None
    recovered_at: float | None = None
    lost_steps: int = 0
    noticed_by: str = ""
    incident: Mapping[str, Any] | None = None

    @property
    def culprit_right(self) -> bool:
        """True if the incident names the expected culprit."""
        if self.incident is None:
            return False
        culprit: Mapping[str, Any] = self.incident["culprit"]
        return all(
            str(value) in str(culprit.get(key)) if key == "detail" else culprit.get(key) == value
            for key, value in self.expected.items()
        )

    @property
    def over(self) -> bool:
        """True once its incident has ended well."""
        return self.incident is not None and self.incident["state"] == "resolved"

    @property
    def passed(self) -> bool:
        """True if the fault was detected, attributed to the right culprit, reported as one incident, and repaired."""
        found = self.detected_at is not None and self.recovered_at is not None and self.culprit_right
        return found and self.over and {*self.fault.symptoms} <= {*self.symptoms}

    @property
    def symptoms(self) -> tuple[str, ...]:
        """The kinds of this incident's symptoms."""
        return tuple(symptom["kind"] for symptom in (self.incident or {}).get("symptoms", ()))


def observe(trial: Trial, now: RunSnapshot) -> None:
    """Update a trial with what is known now. An incident from before the injection never counts."""
    if trial.incident is None or trial.incident["state"] not in ("resolved", "escalated"):
        for incident in now.incidents or ():
            if incident["kind"] == trial.fault.runbook and incident["opened_at"] >= trial.injected_at:
                trial.incident = incident
                break
    if trial.detected_at is None and trial.incident is not None:
        noticed = [e["t"] for e in now.events if e["t"] >= trial.injected_at and e["event"] in _NOTICED]
        trial.detected_at, trial.noticed_by = min(
            [(trial.incident["opened_at"], "the agent"), *((at, "the launcher") for at in noticed)]
        )
    if trial.recovered_at is None and trial.detected_at is not None:
        trial.recovered_at = trial.fault.recovered(trial, now)
    trial.lost_steps = sum(e["lost_steps"] for e in now.events if _resumed_after(trial, e))


_NOTICED = ("rank_exited", "hang_detected")


def _resumed_after(trial: Trial, event: Mapping[str, Any]) -> bool:
    end = trial.recovered_at or float("inf")
    return event["event"] == "resumed" and trial.injected_at <= float(event["t"]) <= end


def _resumed(trial: Trial, now: RunSnapshot) -> float | None:
    return next((e["t"] for e in now.events if _resumed_after(trial, e)), None)


def _stepping_again(trial: Trial, now: RunSnapshot) -> float | None:
    if resumed := _resumed(trial, now):
        return resumed
    return now.wall if now.step > trial.injected_step + 1 else None


def _incident_resolved(trial: Trial, _now: RunSnapshot) -> float | None:
    if trial.incident is None or trial.incident["state"] != "resolved":
        return None
    return float(trial.incident["resolved_at"])


def _rank(now: RunSnapshot, rank: int) -> RankPage:
    return next(page for page in now.pages if page.rank == rank)


def _kill_rank(_targets: FaultTargets, now: RunSnapshot) -> dict[str, object]:
    os.kill(_rank(now, 1).pid, signal.SIGKILL)
    return {"component": "rank", "rank": 1}


def _stop_rank(_targets: FaultTargets, now: RunSnapshot) -> dict[str, object]:
    os.kill(_rank(now, 1).pid, signal.SIGSTOP)
    return {"component": "rank", "rank": 1}


def _stall_loader(_targets: FaultTargets, now: RunSnapshot) -> dict[str, object]:
    pid = next(pid for pid, role in _rank(now, 0).workers if role == "data")
    os.kill(pid, signal.SIGSTOP)
    return {"component": "data", "rank": 0}


def _corrupt_and_crash(targets: FaultTargets, now: RunSnapshot) -> dict[str, object]:
    """Flip one bit in the largest file of the newest checkpoint, then kill a rank and delete the copy in memory."""
    folder = manifest.folder_of(targets.checkpoints, manifest.steps(targets.checkpoints)[-1])
    entry = max(manifest.read(folder).files, key=lambda file: file.size)
    with open(folder / entry.name, "r+b") as file:
        file.seek(entry.size // 2)
        byte = file.read(1)
        file.seek(entry.size // 2)
        file.write(bytes([byte[0] ^ 0x10]))
    os.kill(_rank(now, 0).pid, signal.SIGKILL)
    for kept in targets.shm.glob("rank-0000.state*"):
        kept.unlink(missing_ok=True)
    return {"component": "storage", "detail": entry.name}


def _committed(_previous: Trial | None, now: RunSnapshot) -> bool:
    return any(event["event"] == "checkpoint_committed" for event in now.events)


def _just_committed(previous: Trial | None, now: RunSnapshot) -> bool:
    since = previous.recovered_at if previous and previous.recovered_at else 0.0
    committed = [e["t"] for e in now.events if e["event"] == "checkpoint_committed" and e["t"] > since]
    return bool(committed) and now.wall - committed[-1] < 1.0


def _fail_memory(targets: FaultTargets, now: RunSnapshot) -> dict[str, object]:
    """A contained uncorrectable memory error: the driver reports Xid 94 and ends the affected program."""
    assert targets.gpus is not None
    targets.gpus[0].raise_xid(94)
    os.kill(_rank(now, 0).pid, signal.SIGKILL)
    return {"component": "gpu", "gpu": 0, "rank": 0}


def _block_fan(targets: FaultTargets, _now: RunSnapshot) -> dict[str, object]:
    """Cooling that is too weak for full load, but sufficient at a power limit 15 % lower."""
    assert targets.gpus is not None
    targets.gpus[1].thermal_tau_s = 2.0
    targets.gpus[1].cooling = 0.59
    return {"component": "gpu", "gpu": 1, "rank": 1}


FAULTS = (
    DemoFault(
        "kill_rank",
        "rank 1 killed (SIGKILL)",
        "rank_crash",
        _kill_rank,
        _resumed,
        "a rank was killed",
        "find out which rank died, and submit the job again",
        ready=_committed,
    ),
    DemoFault(
        "stop_rank",
        "rank 1 stopped (SIGSTOP)",
        "rank_hang",
        _stop_rank,
        _resumed,
        "a rank stopped, and all others waited for it",
        "see that no step is done, find the rank that hangs, kill the job and submit it again",
    ),
    DemoFault(
        "stall_dataloader",
        "data worker stopped",
        "dataloader_stall",
        _stall_loader,
        _stepping_again,
        "the process that reads the data stopped",
        "find the loader that delivers nothing, and restart the job",
        restarts=False,
    ),
    DemoFault(
        "corrupt_checkpoint",
        "checkpoint damaged, rank and memory lost",
        "checkpoint_corrupt",
        _corrupt_and_crash,
        _resumed,
        "a rank died, and the newest checkpoint was damaged",
        "find out why the job does not start again, delete the damaged checkpoint, and submit it again",
        ready=_just_committed,
    ),
    DemoFault(
        "fail_gpu_memory",
        "GPU 0 memory error (simulated)",
        "gpu_xid",
        _fail_memory,
        _resumed,
        "the memory of a GPU had an error that the driver contained",
        "look up what Xid 94 means, and submit the job again",
        symptoms=("rank_crash",),
        simulated=True,
    ),
    DemoFault(
        "throttle_gpu",
        "GPU 1 overheats (simulated)",
        "gpu_throttle",
        _block_fan,
        _incident_resolved,
        "a GPU became too hot and slowed all others down",
        "find the slow GPU among all, and lower its power limit",
        restarts=False,
        simulated=True,
    ),
)
"""In the order of injection."""


@dataclass
class Director:
    """Injects the faults one after the other, each once the run is steady again, and tracks them.

    Steady means that the run has done ``gap_steps`` steps in at least ``gap_s`` seconds since the last repair,
    and that the launcher has warm interpreters again; the wait for these is at most ``warm_s``. A repair has
    ``limit_s``, and the end of its incident ``end_s`` after the last injection. ``waits_for`` says what is awaited.
    """

    targets: FaultTargets
    faults: tuple[DemoFault, ...]
    gap_steps: int = 12
    gap_s: float = 1.5
    warm_s: float = 10.0
    limit_s: float = 90.0
    end_s: float = 120.0
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waiting = list(self.faults)
        self._steady_step: int | None = None
        self._steady_at = 0.0
        self.waits_for, self._now = "the first steps", 0.0

    def tick(self, now: RunSnapshot) -> str | None:
        """Process one snapshot; returns the title of a fault that was just injected, or None."""
        self._now = now.wall
        for trial in self.trials:
            observe(trial, now)
        busy = self.trials and self.trials[-1].recovered_at is None
        if busy and now.wall - self.trials[-1].injected_at < self.limit_s:
            self._steady_step = None
            self.waits_for = f"the repair of: {self.trials[-1].fault.title}"
            return None
        if not self._waiting:
            open_ones = [trial.fault.runbook for trial in self.trials if not trial.over]
            self.waits_for = f"the end of {', '.join(open_ones)}" if open_ones else "nothing more"
            return None
        fault = self._waiting[0]
        if not self._steady(now):
            self.waits_for = "a steady run with warm interpreters" if fault.restarts else "a steady run"
            return None
        if not fault.ready(self.trials[-1] if self.trials else None, now):
            self.waits_for = "a checkpoint"
            return None
        del self._waiting[0]
        self.trials.append(Trial(fault, now.wall, now.step, expected={}))
        self.trials[-1].expected = fault.inject(self.targets, now)
        self._steady_step = None
        return fault.title

    @property
    def done(self) -> bool:
        """True once every fault was injected and is repaired and its incident has ended, or its time is up."""
        if self._waiting:
            return False
        late = self._now - self.trials[-1].injected_at > self.end_s
        return late or all(trial.over and trial.recovered_at is not None for trial in self.trials)

    def _steady(self, now: RunSnapshot) -> bool:
        if now.step < 0 or now.incidents is None:
            return False
        if self._steady_step is None:
            self._steady_step, self._steady_at = now.step, now.wall
        waited = now.wall - self._steady_at
        warm = not self._waiting[0].restarts or now.standby >= len(now.pages) or waited > self.warm_s
        return warm and now.step >= self._steady_step + self.gap_steps and waited >= self.gap_s
