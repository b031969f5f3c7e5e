"""The API's answers as JSON-able values, made from a snapshot. Pure.

Jobs and repairs of this node: whose its GPUs are, which are idle, and where its repair is. Pure.

The shapes of the API's answers: records of the agent, with the fields that an answer leaves out or adds.

``openapi.json`` is made from them (`make generate`), and tests hold the answers against it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from opsd import __version__
from opsd.agent.brief import Brief, brief
from opsd.agent.correlate import joint_gpu_seconds, symptoms_of
from opsd.agent.gather import Health, Source
from opsd.agent.loop import Snapshot
from opsd.agent.similar_incidents import KindStatistics, Similar, nearest, statistics
from opsd.agent.store import to_document
from opsd.collectors.base import GpuFact, RankFact, RepairFact, RepairStep, RunFact
from opsd.runbooks.base import Incident
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


PUBLIC = (
    "id", "kind", "key", "severity", "state", "summary", "culprit", "confidence", "evidence", "cost", "job", "run",
    "opened_at", "last_seen_at", "resolved_at", "attempts", "verdict", "actions", "cause", "relapses",
    "ack", "closed",
)  # fmt: skip
BRIEF = ("id", "kind", "state", "severity", "summary", "culprit", "opened_at", "resolved_at")
STEP = ("what", "at", "ended_at", "ok", "detail")
GAUGES = {
    "DCGM_FI_DEV_GPU_UTIL": "utilization_percent",
    "DCGM_FI_DEV_GPU_TEMP": "temperature_celsius",
    "DCGM_FI_DEV_POWER_USAGE": "power_watts",
    "DCGM_FI_DEV_SM_CLOCK": "sm_clock_mhz",
    "DCGM_FI_DEV_FB_USED": "memory_used_mib",
    "opsd_gpu_temperature_margin_celsius": "temperature_margin_celsius",
}
"""Fields of each GPU in the status: series -> name; null where a GPU does not have it."""


def encode(value: object) -> bytes:
    """``value`` as one line of JSON; numbers that JSON does not have (NaN, infinity) become null."""
    try:
        text = json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), default=str)
    return text.encode() + b"\n"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value


def incident(incident: Incident, symptoms: Sequence[Incident] = (), *, nested: bool = True) -> dict[str, Any]:
    """One incident with its ``symptoms``, complete (``nested``) or in brief. Times are epoch seconds.

    ``joint_gpu_seconds`` is its cost together with them; overlapping losses count once.
    """
    document = to_document(incident)
    return {
        **{name: document[name] for name in PUBLIC},
        "symptoms": [_symptom(symptom, nested) for symptom in symptoms],
        "joint_gpu_seconds": joint_gpu_seconds([incident, *symptoms]),
    }


def _symptom(symptom: Incident, nested: bool) -> dict[str, Any]:
    whole = incident(symptom)
    return whole if nested else {name: whole[name] for name in BRIEF}


def newest_first(snapshot: Snapshot) -> list[Incident]:
    """Current and remembered incidents, newest first."""
    return sorted((*snapshot.incidents, *snapshot.ended), key=lambda i: i.opened_at, reverse=True)


def incident_list(
    snapshot: Snapshot, states: Iterable[str] = (), limit: int | None = None, *, node: str = "", nested: bool = False
) -> dict[str, Any]:
    """``{"incidents": [...]}``, newest first; ``states`` filters by state, "current" means all that are not resolved.

    Symptoms are listed below their cause, in brief or (``nested``) complete.
    """
    wanted, known = set(states), newest_first(snapshot)
    ids = {i.id for i in known}
    found = [
        i for i in known
        if i.cause not in ids
        and (not wanted or i.state.value in wanted or ("current" in wanted and i.resolved_at is None))
    ]  # fmt: skip
    return {
        "incidents": [
            {
                **incident(i, (symptoms := symptoms_of(i.id, known)), nested=nested),
                "brief": _brief(snapshot, i, node, symptoms),
            }
            for i in found[:limit]
        ]
    }


def _brief(snapshot: Snapshot, found: Incident, node: str, symptoms: Sequence[Incident]) -> dict[str, Any]:
    return asdict(brief(found, snapshot.mode_of(found.kind), node, symptoms))


def incident_details(snapshot: Snapshot, found: Incident, node: str) -> dict[str, Any]:
    """One incident with its brief, its symptoms, and the past incidents most like it."""
    known = newest_first(snapshot)
    symptoms = symptoms_of(found.id, known)
    return {
        **incident(found, symptoms),
        "brief": _brief(snapshot, found, node, symptoms),
        "similar": [_similar(s) for s in nearest(found, known)],
    }


def _similar(similar: Similar) -> dict[str, Any]:
    whole = incident(similar.incident)
    return {
        **{name: whole[name] for name in (*BRIEF, "verdict")},
        "similarity": similar.similarity,
        "done": list(similar.done),
        "helped": similar.helped,
    }


def incident_statistics(snapshot: Snapshot) -> dict[str, Any]:
    """``{"kinds": [...]}``: statistics of incidents by kind."""
    return {"kinds": [asdict(record) for record in statistics(newest_first(snapshot))]}


def repair_list(snapshot: Snapshot, states: Iterable[str] = (), limit: int | None = None) -> dict[str, Any]:
    """``{"repairs": [...]}``, newest first; ``states`` filters by state, "current" means all that have not ended."""
    wanted = set(states)
    found = [
        r for r in reversed(snapshot.repairs)
        if not wanted or r.state in wanted or ("current" in wanted and r.end is None)
    ]  # fmt: skip
    return {"repairs": [repair_details(r) for r in found[:limit]]}


def repair_details(found: RepairFact) -> dict[str, Any]:
    """One repair with its steps in order. Times are epoch seconds; a step is ``ok`` once it has ended well."""
    steps = [{name: getattr(s, name) for name in STEP} for s in found.attempts]
    whole = asdict(found)
    del whole["attempts"], whole["resumed_at"]
    return {**whole, "state": found.state, "steps": steps}


def find(snapshot: Snapshot, id: str) -> Incident | None:
    """The incident with this id, None if the agent does not remember it."""
    return next((i for i in (*snapshot.incidents, *snapshot.ended) if i.id == id), None)


def status(snapshot: Snapshot, facts: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The state of agent and node. ``facts`` come first; ``now`` is the monotonic second for ages."""
    return {
        **facts,
        "version": __version__,
        "tick": snapshot.tick,
        "tick_age_s": round(now - snapshot.at, 3),
        "series": sum(len(samples) for samples in snapshot.samples),
        "collectors": [_collector(source, now) for source in snapshot.sources],
        "journal": {"up": not snapshot.journal_problem, "problem": snapshot.journal_problem},
        "repair": asdict(repair) if (repair := repair_now(snapshot)) else None,
        "lemon": snapshot.value("opsd_node_lemon") == 1,
        "faults": snapshot.value("opsd_node_faults"),
        "incidents": Counter(i.state.value for i in snapshot.incidents if i.cause is None),
        "gpus": [{**asdict(gpu), **_gauges(snapshot, gpu.uuid)} for gpu in snapshot.gpus],
        "ranks": [_rank(rank, now) for rank in snapshot.ranks],
        "runs": [asdict(run) for run in snapshot.runs],
        "jobs": [asdict(job) for job in jobs_on_gpus(snapshot)],
    }


def _collector(source: Source, now: float) -> dict[str, Any]:
    return {
        "name": source.name,
        "state": source.health.value,
        "reason": source.reason,
        "duration_s": round(source.duration_s, 6),
        "errors": source.errors,
        "last_success_age_s": None if source.succeeded_at is None else round(now - source.succeeded_at, 3),
        "series": len(source.reading.samples),
    }


def _gauges(snapshot: Snapshot, uuid: str) -> dict[str, float | None]:
    values = {metric.name: value for metric, value, labels in snapshot.select(*GAUGES) if uuid in labels}
    return {name: values.get(metric) for metric, name in GAUGES.items()}


def ranks(snapshot: Snapshot, job: str = "") -> bytes:
    """``{"ranks": [...]}``: the content of the rank pages, including recent steps; only those of ``job`` if given.

    ``at`` is the monotonic second of the snapshot; the times of ranks are on the same clock. Encoded rank by rank:
    as objects the steps of all of them take many times as much memory.
    """
    found = (rank for rank in snapshot.ranks if job in ("", rank.job, rank.run))
    head = encode({"at": snapshot.at, "wall": snapshot.wall, "ranks": []}).removesuffix(b"]}\n")
    return head + b", ".join(encode(asdict(rank)).rstrip() for rank in found) + b"]}\n"


def _rank(rank: RankFact, now: float) -> dict[str, Any]:
    last = rank.steps[-1] if rank.steps else None
    return {
        "run": rank.run, "rank": rank.rank, "generation": rank.generation, "gpu": rank.gpu, "pid": rank.pid,
        "live": rank.live, "process": rank.process, "phase": rank.phase, "phase_s": round(now - rank.phase_since, 3),
        "step": last.step if last else None, "step_s": round(last.duration_s, 6) if last else None,
        "committed_step": rank.committed_step, "planned_step": rank.planned,
    }  # fmt: skip


class Record(NamedTuple):
    """An object: the fields of the dataclass ``of`` (``only`` these, if given) and ``more``, by name.

    A value of ``more`` is a type, another Record, or a list with one Record.
    """

    name: str
    about: str
    more: Mapping[str, Any] = {}
    of: type | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


ACTION: Final = Record(
    "ActionTaken",
    "An action of the agent, or one that it recommends. `ended_at` is there once it has ended, `resumed` if it was "
    "carried out again after a restart of the agent.",
    {
        "verb": str, "target": str, "args": dict[str, Any], "reason": str, "at": float, "outcome": str, "detail": str,
        "ended_at?": float, "resumed?": bool,
    },
)  # fmt: skip
_INCIDENT: Final = {"actions": [ACTION], "joint_gpu_seconds": float}
SYMPTOM: Final = Record(
    "Symptom", "A symptom, complete.", {**_INCIDENT, "symptoms": list[dict[str, Any]]}, Incident, PUBLIC
)
BRIEF_SYMPTOM: Final = Record("BriefSymptom", "A symptom in brief.", {}, Incident, BRIEF)
_TOLD: Final = {**_INCIDENT, "brief": Brief}
LISTED: Final = Record(
    "ListedIncident",
    "An incident that is no symptom. `joint_gpu_seconds` is its cost together with that of its symptoms; losses that "
    "overlap count once. `symptoms` are complete if `?symptoms=1` asks for it.",
    {**_TOLD, "symptoms": [BRIEF_SYMPTOM, SYMPTOM]}, Incident, PUBLIC,
)  # fmt: skip
SIMILAR: Final = Record(
    "SimilarIncident",
    "A past incident: `similarity` is 0 to 1, `done` are executed verbs, `helped` is null if none was executed.",
    {"similarity": float, "done": list[str], "helped": bool | None}, Incident, (*BRIEF, "verdict"),
)  # fmt: skip
INCIDENT: Final = Record(
    "IncidentDetails", "An incident with its symptoms and the past incidents most like it.",
    {**_TOLD, "symptoms": [SYMPTOM], "similar": [SIMILAR]}, Incident, PUBLIC,
)  # fmt: skip
INCIDENTS: Final = Record("Incidents", "Newest first.", {"incidents": [LISTED]})
REPAIR: Final = Record(
    "Repair", "A repair of this node with its steps in order.",
    {"state": str, "steps": [Record("RepairStep", "`ok` is null until the step has ended.", {}, RepairStep, STEP)]},
    RepairFact, without=("attempts", "resumed_at"),
)  # fmt: skip
REPAIRS: Final = Record("Repairs", "Newest first.", {"repairs": [REPAIR]})
STATISTICS: Final = Record("Statistics", "Incidents by kind.", {"kinds": list[KindStatistics]})
RANKS: Final = Record(
    "Ranks",
    "`at` is the monotonic second of the answer, `wall` the same in epoch seconds. Times of ranks are monotonic.",
    {"at": float, "wall": float, "ranks": list[RankFact]},
)
COLLECTOR: Final = Record(
    "Collector",
    "`last_success_age_s` is null if it never succeeded.",
    {
        "name": str, "state": Health, "reason": str, "duration_s": float, "errors": int,
        "last_success_age_s": float | None, "series": int,
    },
)  # fmt: skip
RANK: Final = Record(
    "RankInBrief",
    "`process` is the kernel's state letter, null once the process is gone; `step` is the last completed one.",
    {
        "run": str, "rank": int, "generation": int, "gpu": int | None, "pid": int, "live": bool, "process": str | None,
        "phase": str, "phase_s": float, "step": int | None, "step_s": float | None, "committed_step": int | None,
        "planned_step": int | None,
    },
)  # fmt: skip
CONFIG: Final = Record(
    "ConfigState",
    "`reloads` were tried, `problem` is that of the last one, `needs_restart` are keys that a reload does not apply.",
    {"reloads": int, "loaded_at": float, "problem": str, "needs_restart": list[str]},
)
GPU: Final = Record("Gpu", "Null is what a GPU does not have.", dict.fromkeys(GAUGES.values(), float | None), GpuFact)
STATUS: Final = Record(
    "Status",
    "Agent and node. `incidents` counts current ones by state; `lemon` is a node that keeps failing.",
    {
        "node": str, "started_at": float, "mode": str, "gpu_hour": float, "currency": str, "config": CONFIG,
        "version": str, "tick": int, "tick_age_s": float, "series": int, "collectors": [COLLECTOR],
        "journal": Record("JournalState", "`problem` is empty while it can be written.", {"up": bool, "problem": str}),
        "repair": RepairNow | None, "lemon": bool, "faults": float | None, "incidents": dict[str, int],
        "gpus": [GPU],
        "ranks": [RANK], "runs": list[RunFact], "jobs": list[JobOnGpus],
    },
)  # fmt: skip
PROBLEM: Final = Record("Problem", "A refusal, in one sentence.", {"error": str})
