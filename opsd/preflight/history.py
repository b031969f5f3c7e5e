"""The node's earlier preflights: one SQLite file in the state folder.

Each run is stored whole as JSON, and its values also as rows, so that trends need no parsing.
"""

from __future__ import annotations

import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from rich.table import Table

from opsd.preflight.base import Check, Verdict, quantity
from opsd.preflight.engine import select
from opsd.preflight.judge import Past, SeriesKey, mad
from opsd.preflight.report import Report, ReportError
from opsd.settings.sections import PreflightSettings
from opsd.slurm.ownership import PreflightResult
from opsd.words import reason

RECENT_RUNS: Final = 5
_SEARCHED: Final = 50

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
  id INTEGER PRIMARY KEY, node TEXT NOT NULL, profile TEXT NOT NULL, started REAL NOT NULL, passed INTEGER NOT NULL,
  report TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS runs_by_node ON runs (node, started);
CREATE TABLE IF NOT EXISTS measured (
  run INTEGER NOT NULL REFERENCES runs (id), check_name TEXT NOT NULL, measure TEXT NOT NULL, subject TEXT NOT NULL,
  at REAL NOT NULL, value REAL NOT NULL, unit TEXT NOT NULL, verdict TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS measured_by_run ON measured (run);
"""

_FORGET: Final = (
    """DELETE FROM measured WHERE run IN (SELECT id FROM runs WHERE node = ?)
    AND run NOT IN (SELECT id FROM runs WHERE node = ? ORDER BY started DESC, id DESC LIMIT ?)""",
    """DELETE FROM runs WHERE node = ?
    AND id NOT IN (SELECT id FROM runs WHERE node = ? ORDER BY started DESC, id DESC LIMIT ?)""",
)


class HistoryError(Exception):
    """The history cannot be read or written; the message says why. The verdict of a preflight never depends on it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One earlier preflight; ``started`` in wall seconds."""

    id: int
    node: str
    profile: str
    started: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Trend:
    """The values of one series over the node's runs, oldest first."""

    check: str
    measure: str
    subject: str
    unit: str
    past: tuple[Past, ...]


class History:
    """The history in the file ``path``, which is created with the first record."""

    def __init__(self, path: Path, *, kept_runs: int = 500) -> None:
        self.path = path
        self._kept_runs = kept_runs

    def record(self, report: Report) -> int:
        """Store ``report`` and delete the node's oldest; returns the number of the run. Raises HistoryError."""
        with self._open(create=True) as db:
            row = (report.node, report.profile, report.started, report.passed, report.to_json())
            run = db.execute(
                "INSERT INTO runs (node, profile, started, passed, report) VALUES (?, ?, ?, ?, ?)", row
            ).lastrowid
            assert run is not None
            db.executemany(
                "INSERT INTO measured VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (run, result.check, v.measure, v.subject, result.started, v.value, v.unit, v.verdict.value)
                    for result in report.results
                    for v in result.values
                ],
            )
            for statement in _FORGET:
                db.execute(statement, (report.node, report.node, self._kept_runs))
            return run

    def runs(self, node: str, limit: int = 20) -> list[Run]:
        """The newest runs of a node, newest first. Raises HistoryError."""
        query = (
            "SELECT id, node, profile, started, passed FROM runs WHERE node = ? ORDER BY started DESC, id DESC LIMIT ?"
        )
        with self._open() as db:
            rows = db.execute(query, (node, limit)).fetchall()
        return [Run(run, name, profile, started, bool(passed)) for run, name, profile, started, passed in rows]

    def nodes(self) -> list[str]:
        """Every node with a run. Raises HistoryError."""
        with self._open() as db:
            return [node for (node,) in db.execute("SELECT DISTINCT node FROM runs ORDER BY node")]

    def past(self, node: str, check: str, runs: int = RECENT_RUNS) -> Mapping[SeriesKey, tuple[Past, ...]]:
        """The values of the last ``runs`` runs in which ``check`` measured something, by series, oldest first.

        Failed values are left out, so that a faulty node does not become its own yardstick. Raises HistoryError.
        """
        query = """SELECT measure, subject, at, value FROM measured
            WHERE run IN (SELECT id FROM runs WHERE node = ? ORDER BY started DESC, id DESC LIMIT ?)
            AND check_name = ? AND verdict != ? ORDER BY at DESC, run DESC"""
        series: dict[SeriesKey, list[Past]] = defaultdict(list)
        with self._open() as db:
            for measure, subject, at, value in db.execute(query, (node, _SEARCHED, check, Verdict.FAIL.value)):
                if len(series[measure, subject]) < runs:
                    series[measure, subject].insert(0, Past(at, value))
        return {key: tuple(values) for key, values in series.items()}

    def facts(self, node: str, check: str) -> Mapping[str, str]:
        """The facts of the newest run in which ``check`` reported any. Raises HistoryError."""
        for run in self.runs(node):
            for result in self.report(run.id).results:
                if result.check == check and result.facts:
                    return result.facts
        return {}

    def report(self, run: int) -> Report:
        """The whole report of a run. Raises HistoryError."""
        with self._open() as db:
            row = db.execute("SELECT report FROM runs WHERE id = ?", (run,)).fetchone()
        if row is None:
            raise HistoryError(f"{self.path} has no run {run}")
        try:
            return Report.from_json(row[0])
        except ReportError as error:
            raise HistoryError(f"run {run} in the history {self.path} cannot be read: {error}") from error

    def trends(self, node: str, runs: int = 20) -> list[Trend]:
        """Every series of the node over its last ``runs`` runs. Raises HistoryError."""
        query = """SELECT check_name, measure, subject, unit, at, value FROM measured
            WHERE run IN (SELECT id FROM runs WHERE node = ? ORDER BY started DESC, id DESC LIMIT ?)
            ORDER BY check_name, measure, subject, at"""
        series: dict[tuple[str, str, str, str], list[Past]] = defaultdict(list)
        with self._open() as db:
            for check, measure, subject, unit, at, value in db.execute(query, (node, runs)):
                series[check, measure, subject, unit].append(Past(at, value))
        return [Trend(*key, tuple(values)) for key, values in series.items()]

    @contextmanager
    def _open(self, create: bool = False) -> Iterator[sqlite3.Connection]:
        if not create and not self.path.exists():
            yield _empty()
            return
        try:
            if create:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path, timeout=10)
            try:
                with db:
                    if create:
                        db.executescript(_SCHEMA)
                    yield db
            finally:
                db.close()
        except (sqlite3.Error, OSError) as error:
            raise HistoryError(f"the history {self.path} cannot be used: {reason(error)}") from error


def _empty() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:")
    db.executescript(_SCHEMA)
    return db


_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 20


def sparkline(values: Sequence[float]) -> str:
    """One bar per value; the lowest bar is the smallest value. Equal values give a line in the middle."""
    low, high = min(values), max(values)
    if low == high:
        return _BARS[3] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def render(trends: Sequence[Trend]) -> Table:
    """The table of all trends."""
    table = Table(box=None, pad_edge=False)
    for heading in ("measure", "of", "trend", "median", "scatter", "last"):
        table.add_column(heading, justify="right" if heading in ("median", "scatter", "last") else "left")
    for trend in trends:
        values = [entry.value for entry in trend.past]
        table.add_row(
            f"{trend.check} {trend.measure.replace('_', ' ')}",
            trend.subject,
            sparkline(values[-_WIDTH:]),
            quantity(median(values), trend.unit),
            quantity(mad(values), trend.unit),
            quantity(values[-1], trend.unit),
        )
    return table


_SEARCHED_RUNS = 100
SKEW_S: Final = 300.0
"""A run that began later than this from now began by a clock that was wrong, and says nothing of when."""


def newest(
    node: str,
    profile: str,
    checks: Iterable[Check],
    settings: PreflightSettings,
    history: History,
    reports: Iterable[Report] = (),
    now: float | None = None,
) -> PreflightResult | None:
    """The newest preflight ``profile`` of ``node`` in ``history`` and ``reports``, None if there is none.

    One that was restricted by --only or --skip, or interrupted, is left out unless it failed. So is one that begins
    after the epoch second ``now`` (by default the clock's): it would be the newest for long. Raises SelectionError for
    settings that leave no check, and HistoryError.
    """
    known = tuple(checks)
    runs = [run for run in history.runs(node, _SEARCHED_RUNS) if run.profile == profile]
    kept = (history.report(run.id) for run in runs)
    given = (report for report in reports if report.node == node and report.profile == profile)
    latest = (time.time() if now is None else now) + SKEW_S
    begun = (report for report in (*given, *kept) if report.started <= latest)
    whole = (r for r in begun if not r.interrupted and (not r.passed or is_whole(r, known, settings)))
    last = max(whole, key=lambda report: report.started, default=None)
    return PreflightResult(last.started, last.passed) if last else None


def is_whole(report: Report, checks: Iterable[Check], settings: PreflightSettings) -> bool:
    """Whether it has all of its profile, but what preflight.skip leaves out. Raises SelectionError."""
    required = {check.name for check in select(tuple(checks), report.profile, skip=settings.skip)}
    return required <= {result.check for result in report.results}
