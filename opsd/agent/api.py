"""What the API answers, as JSON-able values made from a snapshot. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from collectors.base import RankFact
from opsd import __version__
from opsd.agent.gather import Source
from opsd.agent.loop import Snapshot
from opsd.agent.store import to_document
from runbooks.base import Incident

_PUBLIC = (
    "id", "kind", "key", "severity", "state", "summary", "culprit", "confidence", "evidence", "cost", "job",
    "opened_at", "last_seen_at", "resolved_at", "attempts", "verdict", "actions",
)  # fmt: skip


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


def incident(incident: Incident) -> dict[str, Any]:
    """One incident. Times are epoch seconds."""
    document = to_document(incident)
    return {name: document[name] for name in _PUBLIC}


def newest_first(snapshot: Snapshot) -> list[Incident]:
    """Current and remembered incidents, the one opened last first."""
    return sorted((*snapshot.incidents, *snapshot.ended), key=lambda i: i.opened_at, reverse=True)


def incident_list(snapshot: Snapshot, states: Iterable[str] = (), limit: int | None = None) -> dict[str, Any]:
    """``{"incidents": [...]}``, newest first; ``states`` leaves only those states, "current" all that are not over."""
    wanted = set(states)
    found = [
        i for i in newest_first(snapshot)
        if not wanted or i.state.value in wanted or ("current" in wanted and i.resolved_at is None)
    ]  # fmt: skip
    return {"incidents": [incident(i) for i in found[:limit]]}


def find(snapshot: Snapshot, id: str) -> Incident | None:
    """The incident with this id, None if the agent does not remember it."""
    return next((i for i in (*snapshot.incidents, *snapshot.ended) if i.id == id), None)


def status(snapshot: Snapshot, facts: Mapping[str, Any], now: float) -> dict[str, Any]:
    """What the agent sees. ``facts`` come first; ``now`` is the monotonic second for ages."""
    return {
        **facts,
        "version": __version__,
        "tick": snapshot.tick,
        "tick_age_s": round(now - snapshot.at, 3),
        "series": sum(len(samples) for samples in snapshot.samples),
        "collectors": [_collector(source, now) for source in snapshot.sources],
        "journal": {"up": not snapshot.journal_problem, "problem": snapshot.journal_problem},
        "incidents": Counter(i.state.value for i in snapshot.incidents),
        "gpus": [asdict(gpu) for gpu in snapshot.gpus],
        "ranks": [_rank(rank, now) for rank in snapshot.ranks],
        "runs": [asdict(run) for run in snapshot.runs],
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
    }
