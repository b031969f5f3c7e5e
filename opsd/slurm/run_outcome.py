"""When a run is over, and what happens to its job then. Pure, except for the file that counts bad starts.

The outcome is what the run itself reports in its last claim. The exit code of srun says little. Up to Slurm 22.05 it is
0 after a node failed, and a launcher that was cut off exits while the others keep training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from opsd import durable, exitcodes
from opsd.checkpoints.claims import Claim
from opsd.files import FileTail

LEASE_GRACE_S = 5.0
"""Wait this long for a renewal of the lease once no step is left; a run with a leader renews it every second."""
LEASE_TIMEOUT_S = 30.0
"""A run that renewed its lease since then is given up after this long without a renewal."""
MAX_SILENT_STARTS = 3
"""Consecutive starts that may end without an outcome and without progress."""
PROGRESS_S = 1800.0
"""A start that lasted this long counts as progress, for programs that report none."""
SHORT_START_S = 120.0
"""A shorter start had at most a minute before its stop signal, and a minute to stop."""
MAX_STOPPED_STARTS = {"SIGUSR1": 3, "SIGUSR2": 3}
DEFAULT_MAX_STOPPED_STARTS = 10
"""Consecutive starts that a signal may stop before they make progress.

SIGTERM may also come from a preemption while the job still counts as running (GraceTime), which is no error.
"""
LAUNCH_FAILED = 233
"""srun's exit code if it could not start its task: ESLURMD_EXECVE_FAILED and similar, 1001, in one byte."""
SIGNAL_EXIT_BASE = 128
"""Exit codes from here on mean that a signal ended the task before it could report anything."""
MISSING_LAUNCHER_S = 20.0
"""How long the launchers that are present have to begin the run without the others."""
_STOPPED = re.compile(r" after (SIG[A-Z0-9]+)$")
_NORMAL_EXITS = (exitcodes.OK, exitcodes.FENCED, exitcodes.INTERRUPTED, exitcodes.REQUEUE)
_FINAL_EXITS = (exitcodes.USAGE, exitcodes.NOT_FOUND, exitcodes.FENCED, exitcodes.INTERRUPTED)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The run is over with ``code``. ``reported``: by the run itself. The nodes are to be excluded from the next start.

    If it was not reported and names lost nodes, the cause is outside the run.
    """

    code: int
    reason: str
    reported: bool = True
    lost: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()


def stopped_by(end: RunOutcome) -> str:
    """The signal that told the run to stop, "" if it ended otherwise."""
    match = _STOPPED.search(end.reason) if end.reported and end.code == exitcodes.REQUEUE else None
    return match[1] if match is not None else ""


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of a run: its newest claim, the steps that still run, and the exit codes of the other steps.

    The last step ended ``gone_s`` seconds ago. The lease was last renewed ``lease_age_s`` ago, infinity if it was not
    renewed since then. A launcher was first ``missing`` ``missing_s`` ago. The run ``needs`` this many nodes.
    """

    claim: Claim | None
    left: frozenset[str]
    codes: Mapping[str, int]
    gone_s: float = 0.0
    lease_age_s: float = float("inf")
    missing_s: float = 0.0
    needs: int = 1


def reported_outcome(claim: Claim | None, start: str) -> RunOutcome | None:
    """The outcome that the run reported in this ``start``, None without one."""
    if claim is None or not _is_of_start(claim, start) or (end := claim.end) is None:
        return None
    more = claim.plan["end"]
    lost, unfit = (tuple(map(str, more.get(key, ()))) for key in ("lost", "unfit"))
    return RunOutcome(end.code, end.reason, True, lost, unfit)


def outcome_of(look: Observation, start: str) -> RunOutcome | None:
    """How the run has ended, None while it goes on: a step still runs, or borrowed nodes renew the lease.

    Another copy of the run also renews the lease; then no launcher of this one is left.
    """
    if (reported := reported_outcome(look.claim, start)) is not None:
        return reported
    if (short := _too_few(look, start)) is not None:
        return short
    if look.left or look.gone_s < LEASE_GRACE_S:
        return None
    codes = set(look.codes.values())
    if exitcodes.FENCED in codes and look.claim is not None and not _is_of_start(look.claim, start):
        return RunOutcome(exitcodes.FENCED, "another copy of the run has begun", reported=False)
    if look.lease_age_s < LEASE_TIMEOUT_S:
        return None
    for code in _FINAL_EXITS:
        if code in codes:
            return RunOutcome(code, f"the launchers ended with {code}", reported=False)
    begun = look.claim is not None and _is_of_start(look.claim, start)
    if not begun and len(codes) == 1 and (0 < min(codes) < SIGNAL_EXIT_BASE or LAUNCH_FAILED in codes):
        return RunOutcome(codes.pop(), "no launcher came to begin the run; what they said is above", reported=False)
    seen = ", ".join(f"{node} {code}" for node, code in sorted(look.codes.items()))
    return RunOutcome(exitcodes.REQUEUE, f"all launchers are gone and none has said why ({seen})", reported=False)


def missing(codes: Mapping[str, int]) -> list[str]:
    """The nodes whose launcher did not start or has failed."""
    return sorted(node for node, code in codes.items() if code not in _NORMAL_EXITS)


def _too_few(look: Observation, start: str) -> RunOutcome | None:
    """The outcome of a start that cannot begin: too few launchers are waiting, and the others are not restarted.

    A node that srun did not reach is lost. A node whose launcher failed while others did not is unfit: it lacks a GPU
    or a file system, or its port is taken. None once the run has begun, since it handles its nodes itself, and None if
    no launcher is left, since that is not the fault of a node.
    """
    nodes = missing(look.codes)
    begun = look.claim is not None and _is_of_start(look.claim, start)
    if begun or not nodes or look.missing_s < MISSING_LAUNCHER_S or not 0 < len(look.left) < look.needs:
        return None
    lost = tuple(node for node in nodes if look.codes[node] == LAUNCH_FAILED)
    unfit = tuple(node for node in nodes if node not in lost)
    whys = [f"no launcher could be started on {', '.join(lost)}"] if lost else []
    whys += [f"the launcher of {node} ended with {look.codes[node]}" for node in unfit]
    why = f"{', '.join(whys)}; {look.needs} are needed and {len(look.left)} are there"
    return RunOutcome(exitcodes.REQUEUE, why, False, lost, unfit)


def _is_of_start(claim: Claim, start: str) -> bool:
    """Whether the claim belongs to this start of the job. A launcher without peers appends its own name."""
    return claim.start == start or claim.start.startswith(f"{start}, ")


class BadStarts:
    """Counts in ``path`` consecutive starts of a run that ended in the same bad way without progress.

    The bad ways are: without an outcome, and told to stop before any progress.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, step: int, lasted_s: float) -> int:
        """Add one that reached ``step``; returns the number since the run last made progress."""
        count, before = self._read()
        count = 1 if step > before or lasted_s >= PROGRESS_S else count + 1
        with suppress(OSError):
            durable.replace(self._path, json.dumps({"count": count, "step": max(step, before)}).encode() + b"\n")
        return count

    @property
    def step(self) -> int:
        """The step that the run had reached, 0 if it never reported one."""
        return self._read()[1]

    def forget(self) -> None:
        """Reset, after a start that ended in another way."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _read(self) -> tuple[int, int]:
        try:
            raw = json.loads(self._path.read_bytes())
            return int(raw["count"]), int(raw["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0


EVENTS, JOB_LOG = "events.jsonl", "job.log"


class RunEvents:
    """The run in ``folder``, from now on."""

    def __init__(self, folder: Path) -> None:
        self._events = FileTail(folder / EVENTS, at_end=True)
        self._job_log = FileTail(folder / JOB_LOG, at_end=True)
        self._lost: set[str] = set()
        self._step = 0

    def job_log(self) -> bytes:
        """New lines of the run's log."""
        return self._job_log.read()

    @property
    def lost(self) -> frozenset[str]:
        """The nodes that were lost and have not come back."""
        self._take()
        return frozenset(self._lost)

    @property
    def step(self) -> int:
        """The highest step with a durable checkpoint, 0 without any."""
        self._take()
        return self._step

    def _take(self) -> None:
        while records := list(self._events.records()):
            for record in records:
                event = record.get("event")
                if event == "node_lost":
                    self._lost.add(str(record.get("lost")))
                elif event in ("launcher_joined", "spare_joined"):
                    self._lost.discard(str(record.get("joined")))
                elif event == "checkpoint_committed" and isinstance(record.get("step"), int):
                    self._step = max(self._step, record["step"])
