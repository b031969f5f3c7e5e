"""What launcher and ranks write about a run: ``run.json`` and the event files. Pure; the content belongs to a user."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from opsd.collectors.base import Event, RunFact

RUN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""The folder of a run is called so; it becomes a label."""
RUN_STATES: Final = ("waiting", "running", "restarting", "stopping", "spare", "finished", "failed")
MAX_WORLD: Final = 1 << 20
"""Ranks that a run may claim to have: sets of them are made."""
MAX_NAME: Final = 64
"""Names of results and sources that are longer are left out."""
MAX_DIGITS: Final = 18
MAX_DEPTH: Final = 16
"""Digits of a whole number, and lists and objects inside one another, in what a user writes."""
EVENTS: Final = frozenset((
    "generation_started", "rank_exited", "hang_detected", "resumed", "checkpoint_committed", "stopped", "finished",
    "node_lost", "spare_joined", "checkpoint_rejected", "checkpoint_loaded", "data_worker_restarted",
    "tp_shards_equal", "replicas_differ", "replay_differs", "evaluation", "data_mixture", "straggler_found",
    "straggler_gone", "rollouts",
))  # fmt: skip
"""Events passed on. Any other is of no use here, and a user's file must not be able to speak for the hardware."""


def parse_event(line: bytes, run: str, now: float, **fields: object) -> Event | None:
    """One line of an event file, ``fields`` added to it; None if it is none of ``EVENTS``.

    No event is later than ``now``.
    """
    record = _parse_object(line)
    if record is None or not isinstance(name := record.get("event"), str) or name not in EVENTS:
        return None
    at = record.get("t")
    if not isinstance(at, int | float) or not 0 <= at <= now:
        at = now
    data = {**record, **fields, "run": run}
    who = f"rank {data['rank']} of {run}" if "rank" in data else run
    return Event(name, float(at), f"{name.replace('_', ' ')}: {who}"[:256], data)


def parse_run(content: bytes, run: str, find: Callable[[int, int], int | None]) -> RunFact | None:
    """The run as ``run.json`` describes it, None if that is no such file.

    ``find`` has the number here of the process with a number and start time, None if it does not live.
    """
    raw = _parse_object(content)
    try:
        if raw is None or raw["state"] not in RUN_STATES:
            return None
        pid = _count(raw["launcher_pid"])
        here = find(pid, _count(raw["launcher_start"]))
        return RunFact(
            run=run,
            job=str(raw["job"])[:64],
            node=str(raw["node"])[:64],
            state=raw["state"],
            generation=_count(raw["generation"]),
            launcher_pid=pid if here is None else here,
            alive=here is not None,
            world_size=_count(raw["world_size"], below=MAX_WORLD),
            control=_path(raw["control"]),
            folder=(folder := _path(raw["folder"])),
            logs=_path(raw.get("logs", f"{folder}/logs")),
        )
    except (ValueError, KeyError, TypeError):
        return None


def named_numbers(value: object, most: int) -> dict[str, float]:
    """Numbers by name as an event may hold them, the first ``most``: names are a user's, series are not free."""
    if not isinstance(value, Mapping):
        return {}
    found = {name: n for name in value if 0 < len(name) <= MAX_NAME and (n := number(value[name])) is not None}
    return {name: found[name] for name in sorted(found)[:most]}


def number(value: object) -> float | None:
    """``value`` as a finite number, None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def _parse_object(text: bytes) -> dict[str, Any] | None:
    """A JSON object that can be stored and sent on: no deep nesting, numbers fit in 64 bits, text is valid Unicode."""
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=_whole)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _is_shallow(value, MAX_DEPTH) else None


def _no_number(_: str) -> None:
    return None


def _finite(text: str) -> float | None:
    return number(float(text))


def _whole(text: str) -> int | None:
    return int(text) if len(text) <= MAX_DIGITS else None


def _is_shallow(value: object, depth: int) -> bool:
    """Whether ``value`` has at most ``depth`` containers inside one another."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(one, depth - 1) for one in inner)


def _path(value: object) -> str:
    path = str(value)[:4096]
    if "\0" in path:
        raise ValueError(f"not a path: {path[:80]!r}")
    return path


def _count(value: object, below: int = 1 << 48) -> int:
    if not isinstance(value, int) or not 0 <= value < below:
        raise ValueError(f"not a count: {value!r}")
    return value
