"""Faults of this cluster as a trace: what Slurm's accounting knows of its nodes, and what journals of agents know.

Slurm's is the output of ``ASK``: one line for each time that a node was down, drained or failed, and one for the whole
cluster. A journal has the drains of one node, and when the incident behind each was over.
"""

from __future__ import annotations

import csv
import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

from opsd.simulate import trace
from opsd.simulate.faults import DAY_S, Effect, FaultsError
from opsd.simulate.trace import Outage, Trace
from opsd.slurm.hostlist import expand
from opsd.slurm.ownership import kind_of

_SQLITE: Final = b"SQLite format 3\x00"
ASK: Final = "sacctmgr --parsable2 show event start=2026-01-01 format=ClusterNodes,NodeName,Start,End,State,Reason"
_STARTS, _ENDS = ("TimeStart", "Start"), ("TimeEnd", "End")
_SPAN: Final = "SELECT min(opened_at), max(opened_at), max(resolved_at) FROM incidents"
_DRAINS: Final = """SELECT a.target, a.at, i.resolved_at, a.kind
FROM actions a LEFT JOIN incidents i ON i.id = a.incident WHERE a.verb IN ('drain_node', 'swap_node') ORDER BY a.at"""
"""The actions after which a node is out of service."""


class EmptyHistoryError(FaultsError):
    """Journals of agents that have seen no incident yet."""


class _Away(NamedTuple):
    """A time of a node in epoch seconds; ``end`` is infinite while it lasts."""

    start: float
    end: float
    kind: str
    effect: Effect


def load(path: Path, nodes: int | None) -> Trace:
    """The trace that ``path`` is: journals, Slurm's events, or the form of ``trace.parse``. Raises FaultsError."""
    if path.is_dir():
        return of_journals(path, nodes)
    if path.is_char_device():
        raise FaultsError(f"{path} is a device: give a file, or a pipe that something writes")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FaultsError(f"{path} cannot be read: {error.strerror}") from error
    if content.startswith(_SQLITE):
        return of_journals(path, nodes)
    text = content.decode(errors="replace")
    if {"NodeName", "State"} <= {*text.partition("\n")[0].strip().split("|")}:
        return of_slurm(path, text, nodes)
    return trace.parse(path, text, nodes)


def of_slurm(path: Path, text: str, nodes: int | None) -> Trace:
    """The outages in Slurm's events of a cluster of ``nodes`` nodes, by default those of its newest ClusterNodes.

    Raises FaultsError.
    """
    found: dict[str, list[_Away]] = defaultdict(list)
    rows = list(csv.DictReader(text.splitlines(), delimiter="|", quoting=csv.QUOTE_NONE))
    whole = next((names for row in reversed(rows) if (names := row.get("ClusterNodes"))), "")
    for number, row in enumerate(rows, start=2):
        if row["NodeName"]:  # empty for events of the whole cluster
            found[row["NodeName"]].append(_event(path, number, row))
    if not found:
        raise FaultsError(f"{path} names no node: give the output of {ASK}")
    nodes = nodes or len(expand(whole))
    if not nodes:
        raise FaultsError(f"{path} names only nodes that have failed: give --trace-nodes, or the output of {ASK}")
    return _trace(path, found, nodes, ())


def of_journals(path: Path, nodes: int | None) -> Trace:
    """The outages in the journal ``path``, or in all below that folder, one for each node. Raises FaultsError."""
    files = sorted(path.rglob("journal.db")) if path.is_dir() else [path]
    if not files:
        raise FaultsError(f"{path} has no journal.db: gather those of the nodes below it, a folder for each")
    found: dict[str, list[_Away]] = defaultdict(list)
    seen: list[float] = []
    for file in files:
        span, drains = _read(file)
        seen += [at for at in span if at is not None]
        for node, start, end, kind in drains:
            found[node].append(_Away(start, math.inf if end is None or end < start else end, kind, "degraded"))
    if not seen:
        raise EmptyHistoryError(f"{path} has no incident yet: there is nothing to replay")
    return _trace(path, found, nodes or len(files), seen)


def _event(path: Path, number: int, row: Mapping[str, str | None]) -> _Away:
    start, end = (_at(path, number, row, names) for names in (_STARTS, _ENDS))
    if end < start:  # in the hour that a clock repeats in autumn
        end = _at(path, number, row, _ENDS, fold=1)
    if math.isinf(start) or end < start:
        raise FaultsError(f"line {number} of {path} has no beginning, or ends before it: give the output of {ASK}")
    state, kind = (row["State"] or "unknown").lower().rstrip("*"), kind_of(row.get("Reason") or "")
    return _Away(start, end, state if kind == "unknown" else kind, "degraded" if "drain" in state else "lost")


def _at(path: Path, number: int, row: Mapping[str, str | None], names: Iterable[str], fold: int = 0) -> float:
    text = next((found for name in names if (found := row.get(name))), "Unknown")
    if text == "Unknown":
        return math.inf
    try:
        return datetime.fromisoformat(text).replace(fold=fold).timestamp()
    except ValueError as error:
        raise FaultsError(f"line {number} of {path}: {text!r} is no time; leave SLURM_TIME_FORMAT unset") from error


def _read(file: Path) -> tuple[Sequence[float | None], Sequence[tuple[str, float, float | None, str]]]:
    """The first and last seconds that a journal knows, and its drains: node, beginning, end, kind of incident."""
    try:
        database = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=5)
        try:
            return database.execute(_SPAN).fetchone(), database.execute(_DRAINS).fetchall()
        finally:
            database.close()
    except sqlite3.Error as error:
        raise FaultsError(f"{file} is no journal of an agent: {error}") from error


def _trace(path: Path, found: Mapping[str, Sequence[_Away]], nodes: int, seen: Iterable[float]) -> Trace:
    """``seen`` are further seconds that the history covers."""
    if nodes < len(found):
        raise FaultsError(f"{path} names {len(found)} nodes, more than --trace-nodes {nodes}: give the cluster's size")
    times = [*seen, *(at for aways in found.values() for away in aways for at in away[:2] if at < math.inf)]
    begin, days = min(times), math.ceil((max(times) - min(times)) / DAY_S)
    span_s = max(1, days) * DAY_S
    played = [tuple(_outages(aways, begin, span_s)) for _, aways in sorted(found.items())]
    return Trace(path.name, (*played, *[()] * (nodes - len(played))), span_s)


def _outages(aways: Iterable[_Away], begin: float, span_s: float) -> Iterator[Outage]:
    """Overlapping outages are one, such as a node that is drained and then goes down."""
    merged: list[_Away] = []
    for away in sorted(aways):
        if merged and away.start <= merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, away.end))
        else:
            merged.append(away)
    for start, end, kind, effect in merged:
        yield Outage(start - begin, min(span_s, end - begin), kind, effect, ended=end < math.inf)
