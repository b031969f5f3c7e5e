"""The API's answers as JSON-able values, made from a snapshot. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from opsd import __version__
from opsd.agent.brief import brief
from opsd.agent.correlate import joint_gpu_seconds, symptoms_of
from opsd.agent.gather import Source
from opsd.agent.loop import Snapshot
from opsd.agent.similar_incidents import Similar, nearest, statistics
from opsd.agent.store import to_document
from opsd.agent.web.jobs import jobs_on_gpus, repair_now
from opsd.collectors.base import RankFact, RepairFact
from opsd.runbooks.base import Incident

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
        "run": rank.run,
        "rank": rank.rank,
        "generation": rank.generation,
        "gpu": rank.gpu,
        "pid": rank.pid,
        "live": rank.live,
        "process": rank.process,
        "phase": rank.phase,
        "phase_s": round(now - rank.phase_since, 3),
        "step": last.step if last else None,
        "step_s": round(last.duration_s, 6) if last else None,
        "committed_step": rank.committed_step,
        "planned_step": rank.planned,
    }
