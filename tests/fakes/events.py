"""Events held against the fields of their classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opsd.events import OF_LAUNCHERS, OF_RANKS, OF_RUNS, name_of

EVENTS = {name_of(event): event for event in (*OF_LAUNCHERS, *OF_RUNS, *OF_RANKS)}
_COMMON = {"t", "event", "generation", "run", "node", "rank"}


def unknown_fields(event: Mapping[str, Any]) -> set[str]:
    """Fields of an event of opsd that its class lacks, or that are missing. An event of a program has none."""
    kind: Any = EVENTS.get(event["event"])
    if kind is None:
        return set()
    known = {*kind.__required_keys__, *kind.__optional_keys__}
    return (event.keys() - known - _COMMON) | (kind.__required_keys__ - event.keys())
