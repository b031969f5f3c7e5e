"""What Slurm thinks of this node: its state, who drained it and why, and the jobs on it.

Slurm is asked rarely and elsewhere (``opsd.agent.collectors``), since a controller may take many seconds to answer.
This collector only looks at the newest report. An old report is dropped rather than shown as if it were true.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from pydantic import Field

from opsd.collectors.base import Collector, Context, Event, Metric, NoData, Plugin, Reading, Sample
from opsd.collectors.lib.gpu_owners import GpuOwners
from opsd.settings.sections import CollectorSettings

STATES: Final = ("idle", "allocated", "mixed", "down", "error", "future", "unknown")
FLAGS: Final = ("drain", "not_responding", "completing", "maintenance", "reserved", "fail", "reboot_requested")
"""Slurm's base states and the flags that are exported, spelled as in the answers of its commands."""
MAX_JOBS: Final = 64
MAX_REASON: Final = 200

UP = Metric("opsd_slurm_up", "1 if Slurm answered the last question, 0 if it is down or slow.")
AGE = Metric("opsd_slurm_answer_age_seconds", "Time since Slurm's last answer, or since the start.", unit="seconds")
STATE = Metric("opsd_slurm_node_state", "1 for Slurm's base state of this node, 0 for the others.", labels=("state",))
FLAG = Metric("opsd_slurm_node_flag", "1 while Slurm's state of this node has the flag.", labels=("flag",))
REASON = Metric(
    "opsd_slurm_node_reason_info", "Why this node is out of service.", "info", labels=("reason", "reason_by")
)
JOBS = Metric("opsd_slurm_jobs", "Jobs on this node.")
JOB = Metric("opsd_slurm_job_info", "A job on this node.", "info", labels=("job_id", "user", "partition", "state"))
FAULTS = Metric(
    "opsd_node_faults",
    "Stays of this node out of service in the last 30 days that nobody had asked for, and jobs that failed on it and "
    "ran without it.",
)
SCORE = Metric(
    "opsd_node_score", "The same, where a fault of the same kind within 14 days of the node's return counts twice."
)
CONFIDENCE = Metric(
    "opsd_node_lemon_confidence_ratio",
    "Probability that this node's faults of 30 days are more than chance; only of nodes with two or more.",
    unit="ratio",
)
LEMON = Metric(
    "opsd_node_lemon",
    "1 while this node is a lemon, in a cluster whose history shows that there are any (`opsd nodes lemons`).",
)
COUNTED = Metric(
    "opsd_node_failed_jobs_counted",
    "1 if opsd_node_faults has the failures of jobs, as an agent could read Slurm's accounting in the last 12 hours, "
    "0 if it has not.",
)

METRICS: Final = (UP, AGE, STATE, FLAG, REASON, JOBS, JOB, FAULTS, SCORE, CONFIDENCE, LEMON, COUNTED)
LABELS: Final = {
    "state": "states of Slurm's node and jobs",
    "flag": "flags that Slurm gives a node, 7 known",
    "reason": "Slurm's reason for the node, one at a time",
    "reason_by": "one at a time",
    "job_id": "jobs on the node, 64 at most",
    "user": "one per job",
    "partition": "one per job",
}


class NodeView(Protocol):
    """What is needed of a node; see ``opsd.slurm.port.Node``."""

    @property
    def state(self) -> str: ...
    @property
    def flags(self) -> frozenset[str]: ...
    @property
    def reason(self) -> str: ...
    @property
    def reason_by(self) -> str: ...


class JobView(Protocol):
    """What is needed of a job; see ``opsd.slurm.port.Job``."""

    @property
    def id(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def partition(self) -> str: ...


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The node's last 30 days: ``faults``, and its ``score``, in which repairs that did not last count twice.

    ``confidence`` is the probability that they are more than chance, None for a node with too few to ask.
    """

    faults: int
    score: float
    confidence: float | None = None
    lemon: bool = False


@dataclass(frozen=True, slots=True)
class SlurmReport:
    """The newest that is known. Times are monotonic seconds.

    ``answered_at`` is the time of the last answer, from which ``node`` (None if Slurm does not know it) and ``jobs``
    are; ``users`` has the user id of each job, ``gpus`` the GRES indexes of its GPUs here where they are known,
    ``shares`` those of which it has a part, ``files`` the device files of each where the node has instances of MIG,
    ``sluids`` each job by its SLUID.
    ``record`` is what Slurm remembers of the node, None while that is not known; ``jobs_counted`` is whether failures
    of jobs are in it, None while nobody has looked. ``problem`` is why the last question was not answered, "" if it
    was; ``absent`` means that this machine has no Slurm.
    """

    answered_at: float | None = None
    node: NodeView | None = None
    jobs: Sequence[JobView] = ()
    problem: str = ""
    absent: bool = False
    users: Mapping[str, int] = field(default_factory=dict)
    gpus: Mapping[str, frozenset[int]] = field(default_factory=dict)
    shares: Mapping[str, frozenset[int]] = field(default_factory=dict)
    sluids: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    record: NodeRecord | None = None
    jobs_counted: bool | None = None


class SlurmSettings(CollectorSettings):
    """What Slurm thinks of this node, and the jobs on it."""

    interval_s: float = Field(default=20.0, ge=1, le=3600, description="Seconds between two questions to Slurm.")


class SlurmCollector:
    """State and jobs of the node ``node``, from ``latest``, which returns at once.

    After ``stale_s`` without an answer the node's series vanish and an event says so. ``gpu_owners`` learns whose jobs
    run here, and which GPUs they were given.
    """

    name = "slurm"
    metrics = METRICS

    def __init__(
        self,
        latest: Callable[[], SlurmReport],
        node: str,
        *,
        stale_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        gpu_owners: GpuOwners | None = None,
    ) -> None:
        self._latest = latest
        self._gpu_owners = gpu_owners or GpuOwners()
        self._node = node
        self._stale_s = stale_s
        self._clock = clock
        self._wall = wall
        self._began: float | None = None
        self._seen = SlurmReport()
        self._silent = False

    def collect(self) -> Reading | NoData:
        """Look at the newest report."""
        report, now = self._latest(), self._clock()
        if self._began is None:
            self._began = now
        self._gpu_owners.jobs, self._gpu_owners.sluids = report.users, report.sluids
        if report.absent:
            return NoData(report.problem)
        if report.answered_at is None and not report.problem:
            return NoData("Slurm has not been asked yet")
        if report.node is None and not report.problem:
            return NoData(f"Slurm has no node {self._node}; if this machine has another name there, set agent.node")
        age = now - (self._began if report.answered_at is None else report.answered_at)
        stale = age > self._stale_s
        events = (*self._silence(stale, report.problem), *self._changes(report))
        self._gpu_owners.allocated = {} if stale else report.gpus
        self._gpu_owners.files = {} if stale else report.files
        self._gpu_owners.shares = {} if stale else report.shares
        samples = [Sample(UP, float(not report.problem and not stale)), Sample(AGE, max(0.0, age))]
        if report.node is not None and not stale:
            samples += _node_samples(report.node)
            samples += _job_samples(report.jobs)
            samples += _record_samples(report.record) if report.record else ()
            samples += [Sample(COUNTED, float(report.jobs_counted))] if report.jobs_counted is not None else []
        return Reading(tuple(samples), events)

    def _silence(self, stale: bool, problem: str) -> Iterator[Event]:
        if stale and not self._silent:
            text = f"Slurm has not answered for {self._stale_s:g} s: {problem}"
            yield Event("slurm_silent", self._wall(), text, {"problem": problem})
        elif self._silent and not stale:
            yield Event("slurm_answers", self._wall(), "Slurm answers again")
        self._silent = stale

    def _changes(self, report: SlurmReport) -> Iterator[Event]:
        """What is different from the answer before, if there was one."""
        before, self._seen = self._seen, report
        if before.answered_at is None or before.answered_at == report.answered_at:
            return
        if report.node is not None and before.node is not None and _state(before.node) != _state(report.node):
            yield self._node_event(report.node, _state(before.node)[0])
        old, new = ({job.id: job for job in jobs} for jobs in (before.jobs, report.jobs))
        for job_id in sorted(old.keys() | new.keys()):
            if job_id not in old:
                yield self._job_event("slurm_job_started", new[job_id], "has come to this node")
            elif job_id not in new:
                yield self._job_event("slurm_job_ended", old[job_id], "has left this node")

    def _node_event(self, node: NodeView, previous: str) -> Event:
        state, reason, by = _state(node)
        why = f": {reason} (by {by})" if reason else ""
        data = {"node": self._node, "state": state, "previous": previous, "reason": reason, "reason_by": by}
        return Event("slurm_node_changed", self._wall(), f"Slurm has {self._node} as {state}{why}", data)

    def _job_event(self, kind: str, job: JobView, what: str) -> Event:
        data = {"job": str(job.id), "user": job.user, "partition": job.partition}
        return Event(kind, self._wall(), f"job {job.id} of {job.user} {what}", data)


def _state(node: NodeView) -> tuple[str, str, str]:
    """State with the exported flags, as in ``idle+drain``; reason; who set it."""
    flags = [flag for flag in FLAGS if flag in node.flags]
    return "+".join([node.state, *flags]), node.reason[:MAX_REASON], node.reason_by


def _node_samples(node: NodeView) -> Iterator[Sample]:
    for state in STATES:
        yield Sample(STATE, float(state == node.state), (state,))
    for flag in FLAGS:
        yield Sample(FLAG, float(flag in node.flags), (flag,))
    if node.reason:
        yield Sample(REASON, 1.0, (node.reason[:MAX_REASON], node.reason_by))


def _job_samples(jobs: Sequence[JobView]) -> Iterator[Sample]:
    yield Sample(JOBS, len(jobs))
    for job in jobs[:MAX_JOBS]:
        yield Sample(JOB, 1.0, (str(job.id), job.user, job.partition, job.state))


def _record_samples(record: NodeRecord) -> Iterator[Sample]:
    yield Sample(FAULTS, record.faults)
    yield Sample(SCORE, record.score)
    yield Sample(LEMON, float(record.lemon))
    if record.confidence is not None:
        yield Sample(CONFIDENCE, record.confidence)


def _make(settings: SlurmSettings, context: Context) -> Collector:
    latest = context.slurm_reports(context.node, settings.interval_s)
    return SlurmCollector(latest, context.node, gpu_owners=context.shared(GpuOwners))


COLLECTOR = Plugin("slurm", SlurmSettings, _make, LABELS)
