"""A node's newest preflight that ran the whole of a profile."""

from __future__ import annotations

from collections.abc import Iterable

from opsd.preflight.base import Check
from opsd.preflight.engine import select
from opsd.preflight.history import History
from opsd.preflight.report import Report
from opsd.settings.preflight import PreflightSettings
from opsd.slurm.ownership import PreflightResult

_SEARCHED = 100


def newest(
    node: str,
    profile: str,
    checks: Iterable[Check],
    settings: PreflightSettings,
    history: History,
    reports: Iterable[Report] = (),
) -> PreflightResult | None:
    """The newest preflight ``profile`` of ``node`` in ``history`` and ``reports``, None if there is none.

    One that was restricted by --only or --skip, or interrupted, is left out unless it failed. Raises SelectionError for
    settings that leave no check, and HistoryError.
    """
    known = tuple(checks)
    runs = [run for run in history.runs(node, _SEARCHED) if run.profile == profile]
    kept = (history.report(run.id) for run in runs)
    given = (report for report in reports if report.node == node and report.profile == profile)
    whole = [r for r in (*given, *kept) if not r.interrupted and (not r.passed or is_whole(r, known, settings))]
    last = max(whole, key=lambda report: report.started, default=None)
    return PreflightResult(last.started, last.passed) if last else None


def is_whole(report: Report, checks: Iterable[Check], settings: PreflightSettings) -> bool:
    """Whether it has all of its profile, but what preflight.skip leaves out. Raises SelectionError."""
    required = {check.name for check in select(tuple(checks), report.profile, skip=settings.skip)}
    return required <= {result.check for result in report.results}
