"""What the journal holds of an incident, written and read. A record that is not exactly one of opsd's is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any, TypeGuard

from pydantic import TypeAdapter, ValidationError

from opsd.agent.policy import PastAction
from opsd.collectors.base import Event, RepairFact
from opsd.collectors.repairs import parse
from opsd.runbooks.base import Incident

_ACTION_TEXTS = ("verb", "target", "reason", "outcome", "detail")
_LAST_S = 1e12
"""Epoch seconds beyond all times."""
_MANY = 1_000_000_000


class RecordError(Exception):
    """A record that opsd did not write."""


def to_document(incident: Incident) -> dict[str, Any]:
    """The incident as JSON-able values, the form of the API and of the journal."""
    document = asdict(incident)
    document["data"] = dict(incident.data)
    document["actions"] = [dict(action) for action in incident.actions]
    document["proposed"] = [dict(action) for action in incident.proposed]
    return document


def to_json(incident: Incident) -> str:
    """The document as JSON text in valid UTF-8. Raises TypeError or ValueError for keys that JSON does not have."""
    return clean(json.dumps(to_document(incident), default=str, ensure_ascii=False))


def from_json(text: object) -> Incident:
    """The incident whose ``to_json`` is ``text``. Raises RecordError for anything else."""
    if not isinstance(text, str):
        raise RecordError("not a text")
    try:
        incident = _incidents().validate_json(text, strict=True)
    except ValidationError as error:
        raise RecordError(f"{error.error_count()} values are none of an incident") from error
    if not all(map(_is_time, _times(incident))):
        raise RecordError("a time is no number")
    if not (0 <= incident.attempts < _MANY and 0 <= incident.relapses < _MANY):
        raise RecordError("a count is none")
    if not all(map(_is_action, incident.actions)) or not all(map(_is_proposal, incident.proposed)):
        raise RecordError("an action lacks its fields")
    return incident


def past_action(row: Sequence[object], now: float) -> PastAction:
    """The action of a row with kind, verb, target, time and user; a time to come is ``now``. Raises RecordError."""
    *texts, at, user = row
    if not all(isinstance(text, str) for text in texts) or not _is_time(at):
        raise RecordError("not an action")
    if user is not None and not isinstance(user, int):
        raise RecordError("not an action of a user")
    kind, verb, target = map(str, texts)
    return PastAction(kind, verb, target, min(at, now), user)


def past_repair(row: Sequence[object]) -> RepairFact:
    """The repair of a row with its id and document. Raises RecordError."""
    id, document = row
    try:
        repair = parse(document if isinstance(document, str) else "")
    except ValueError as error:
        raise RecordError("not a repair") from error
    if repair.id != id:
        raise RecordError("column and document differ")
    return repair


def event_document(event: Event) -> str:
    """What the journal keeps of an event beside its time. Raises TypeError or ValueError for what JSON has not."""
    return json.dumps(
        {"kind": event.kind, "at": 0.0, "message": event.message, "data": dict(event.data)}, ensure_ascii=False
    )


def past_event(row: Sequence[object], now: float) -> Event:
    """The event of a row with its time and document; a time to come is ``now``. Raises RecordError."""
    at, document = row
    try:
        event = _events().validate_json(document if isinstance(document, str) else "")
    except ValidationError as error:
        raise RecordError("not an event") from error
    if not _is_time(at):
        raise RecordError("a time is no number")
    return replace(event, at=min(at, now))


def clean(text: str) -> str:
    """``text`` as valid UTF-8: names that users give may be any bytes."""
    return text.encode(errors="replace").decode()


@cache
def _events() -> TypeAdapter[Event]:
    return TypeAdapter(Event)


@cache
def _incidents() -> TypeAdapter[Incident]:
    return TypeAdapter(Incident)


def _times(incident: Incident) -> Iterator[float]:
    yield from (incident.opened_at, incident.last_seen_at)
    ends: tuple[float | None, ...] = (
        incident.healthy_since,
        incident.acted_at,
        incident.resolved_at,
        incident.reopened_at,
    )
    if (ack := incident.ack) is not None:
        ends = (*ends, ack.at, ack.until, ack.over_at)
    if (end := incident.closed) is not None:
        ends = (*ends, end.at, end.gone_at)
    yield from (at for at in ends if at is not None)
    yield from (at for evidence in incident.evidence for at in (evidence.at, evidence.newest))


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and -_LAST_S < value < _LAST_S


def _is_action(action: Mapping[str, object]) -> bool:
    texts = all(isinstance(action.get(name), str) for name in _ACTION_TEXTS)
    return texts and isinstance(action.get("args"), dict) and _is_time(action.get("at"))


def _is_proposal(action: Mapping[str, object]) -> bool:
    return isinstance(action.get("verb"), str) and isinstance(action.get("args"), dict)
